// Command collector is an OpenTelemetry Collector with what the tests need: it receives OTLP over gRPC and HTTP, and writes all
// that it gets into files, one JSON document a line.
package main

import (
	"context"
	"log"
	"os"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/exporterhelper"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

// fileConfig is the configuration of the exporter `file`.
type fileConfig struct {
	Path string `mapstructure:"path"`
}

// appendLine writes one document at the end of the file.
func (c *fileConfig) appendLine(document []byte, err error) error {
	if err != nil {
		return err
	}
	file, err := os.OpenFile(c.Path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.Write(append(document, '\n'))
	return err
}

func newTraces(ctx context.Context, set exporter.Settings, config component.Config) (exporter.Traces, error) {
	write := func(_ context.Context, traces ptrace.Traces) error {
		return config.(*fileConfig).appendLine((&ptrace.JSONMarshaler{}).MarshalTraces(traces))
	}
	return exporterhelper.NewTraces(ctx, set, config, write)
}

func newLogs(ctx context.Context, set exporter.Settings, config component.Config) (exporter.Logs, error) {
	write := func(_ context.Context, logs plog.Logs) error {
		return config.(*fileConfig).appendLine((&plog.JSONMarshaler{}).MarshalLogs(logs))
	}
	return exporterhelper.NewLogs(ctx, set, config, write)
}

func factories() (otelcol.Factories, error) {
	files := exporter.NewFactory(
		component.MustNewType("file"),
		func() component.Config { return &fileConfig{} },
		exporter.WithTraces(newTraces, component.StabilityLevelStable),
		exporter.WithLogs(newLogs, component.StabilityLevelStable),
	)
	receivers, err := otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory())
	if err != nil {
		return otelcol.Factories{}, err
	}
	exporters, err := otelcol.MakeFactoryMap[exporter.Factory](files)
	return otelcol.Factories{Receivers: receivers, Exporters: exporters, Telemetry: otelconftelemetry.NewFactory()}, err
}

func main() {
	settings := otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "collector", Description: "The Collector of Keyward's tests", Version: "1"},
		Factories: factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{
			ResolverSettings: confmap.ResolverSettings{
				ProviderFactories: []confmap.ProviderFactory{fileprovider.NewFactory()},
				DefaultScheme:     "file",
			},
		},
	}
	if err := otelcol.NewCommand(settings).Execute(); err != nil {
		log.Fatal(err)
	}
}
