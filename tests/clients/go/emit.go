// The record: JSON lines on stdout, and errors in etcd's words. Secrets never come here.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrChannelClosed stands for a watch or keepalive channel that clientv3 closed without a word.
var errChannelClosed = errors.New("channel closed")

type fields map[string]any

var (
	started = time.Now()
	stdout  sync.Mutex
)

// Elapsed is the `t` of the record: milliseconds since the start.
func elapsed() int64 { return time.Since(started).Milliseconds() }

// Emit prints one line at once, so that a reader sees it even if the process dies next.
func emit(kind string, more fields) {
	line := fields{"t": elapsed(), "kind": kind}
	for name, value := range more {
		line[name] = value
	}
	text, err := json.Marshal(line)
	if err != nil {
		panic(fmt.Sprintf("a field of %q cannot be JSON: %v", kind, err))
	}
	stdout.Lock()
	defer stdout.Unlock()
	os.Stdout.Write(append(text, '\n'))
}

// Describe gives the gRPC code and the text of an error as an application that looks closely gets them.
func describe(err error) (code, message string) {
	var known rpctypes.EtcdError
	switch {
	case err == nil:
		return codes.OK.String(), ""
	case errors.As(err, &known):
		return known.Code().String(), known.Error()
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded.String(), err.Error()
	case errors.Is(err, context.Canceled):
		return codes.Canceled.String(), err.Error()
	}
	s, _ := status.FromError(err)
	return s.Code().String(), s.Message()
}

// EmitError records one error that the application saw.
func emitError(op string, begun int64, err error, more fields) {
	code, message := describe(err)
	line := fields{"op": op, "code": code, "message": message, "start": begun, "end": elapsed()}
	for name, value := range more {
		line[name] = value
	}
	emit("error", line)
}

// RecordPanic is deferred where clientv3's recipes may panic: it records the place and lets the process die as Go does.
func recordPanic() {
	cause := recover()
	if cause == nil {
		return
	}
	emit("panic", fields{"message": fmt.Sprint(cause), "at": panicSite()})
	panic(cause)
}

// PanicSite names the innermost frame that is neither Go's runtime nor ours, like "queue.go:70".
func panicSite() string {
	counters := make([]uintptr, 32)
	frames := runtime.CallersFrames(counters[:runtime.Callers(2, counters)])
	for {
		frame, more := frames.Next()
		if !strings.HasPrefix(frame.Function, "runtime.") && !strings.HasPrefix(frame.Function, "main.recordPanic") {
			return fmt.Sprintf("%s:%d", filepath.Base(frame.File), frame.Line)
		}
		if !more {
			return ""
		}
	}
}
