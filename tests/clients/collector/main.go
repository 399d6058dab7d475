// Command collector is the OTLP receiver of the OpenTelemetry Collector: it receives spans and log records over gRPC and HTTP, and writes all
// that it gets into the files traces.json and logs.json of a folder, one JSON document a line. It says "ready" once it listens.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/otel/metric/noop"
	nooptrace "go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/zap"
)

// appendLine writes one document at the end of the file.
func appendLine(path string, document []byte, err error) error {
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.Write(append(document, '\n'))
	return err
}

// host is a collector without extensions.
type host struct{}

func (host) GetExtensions() map[component.ID]component.Component { return nil }

// build is the receiver, which listens at these addresses once it is started.
func build(ctx context.Context, grpc, http, folder string) (component.Component, error) {
	factory := otlpreceiver.NewFactory()
	config := factory.CreateDefaultConfig()
	protocols := map[string]any{"grpc": map[string]any{"endpoint": grpc}, "http": map[string]any{"endpoint": http}}
	if err := confmap.NewFromStringMap(map[string]any{"protocols": protocols}).Unmarshal(config); err != nil {
		return nil, err
	}
	logger, err := zap.NewProduction()
	if err != nil {
		return nil, err
	}
	settings := receiver.Settings{
		ID: component.NewID(factory.Type()),
		TelemetrySettings: component.TelemetrySettings{
			Logger: logger, TracerProvider: nooptrace.NewTracerProvider(), MeterProvider: noop.NewMeterProvider(), Resource: pcommon.NewResource(),
		},
	}
	traces, err := consumer.NewTraces(func(_ context.Context, traces ptrace.Traces) error {
		document, err := (&ptrace.JSONMarshaler{}).MarshalTraces(traces)
		return appendLine(filepath.Join(folder, "traces.json"), document, err)
	})
	if err != nil {
		return nil, err
	}
	logs, err := consumer.NewLogs(func(_ context.Context, logs plog.Logs) error {
		document, err := (&plog.JSONMarshaler{}).MarshalLogs(logs)
		return appendLine(filepath.Join(folder, "logs.json"), document, err)
	})
	if err != nil {
		return nil, err
	}
	// One receiver for both, since both are asked of one configuration.
	if _, err := factory.CreateLogs(ctx, settings, config, logs); err != nil {
		return nil, err
	}
	return factory.CreateTraces(ctx, settings, config, traces)
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: collector GRPC_ADDRESS HTTP_ADDRESS FOLDER")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	receiver, err := build(ctx, os.Args[1], os.Args[2], os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	if err := receiver.Start(ctx, host{}); err != nil {
		log.Fatal(err)
	}
	log.Print("ready")
	<-ctx.Done()
	if err := receiver.Shutdown(context.Background()); err != nil {
		log.Fatal(err)
	}
}
