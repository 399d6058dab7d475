// What crosses the wire under clientv3: every attempt of a call and every stream, also those that clientv3 retries in
// silence. The errors that an application saw are `error` lines; `attempt_failed` and `stream_ended` without one are hidden.
package main

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

const watchMethod = "/etcdserverpb.Watch/Watch"

var seen = &wire{
	attempts: map[string]int{}, streams: map[string]int{}, failed: map[string]int{}, dialed: map[string]int{}, watching: make(chan struct{}),
}

// Wire counts over all clients of the process.
type wire struct {
	mutex    sync.Mutex
	attempts map[string]int // unary attempts by method
	streams  map[string]int // streams opened by method
	failed   map[string]int // failed attempts and ended streams by "method code"
	dialed   map[string]int // connections begun by address, where a scenario wants to know
	watching chan struct{}  // closed when the first answer came on a watch stream
	first    sync.Once
}

func (w *wire) count(into map[string]int, name string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	into[name]++
}

func (w *wire) failure(kind, method string, begun int64, err error) {
	if errors.Is(err, io.EOF) {
		err = nil
	}
	s, _ := status.FromError(err)
	w.count(w.failed, method+" "+s.Code().String())
	emit(kind, fields{"method": method, "code": s.Code().String(), "message": s.Message(), "start": begun, "end": elapsed()})
}

func (w *wire) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	begun := elapsed()
	w.count(w.attempts, method)
	err := invoke(ctx, method, req, reply, cc, opts...)
	if err != nil {
		w.failure("attempt_failed", method, begun, err)
	}
	return err
}

func (w *wire) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	begun := elapsed()
	stream, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		w.failure("attempt_failed", method, begun, err)
		return nil, err
	}
	w.count(w.streams, method)
	return &wireStream{ClientStream: stream, asked: ctx, wire: w, method: method, begun: begun}, nil
}

// WireStream records how a stream ended, once. A cancel by the application is no news; one by the server is.
type wireStream struct {
	grpc.ClientStream
	asked  context.Context
	wire   *wire
	method string
	begun  int64
	once   sync.Once
}

func (s *wireStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err == nil && s.method == watchMethod {
		s.wire.first.Do(func() { close(s.wire.watching) })
	}
	if err != nil && s.asked.Err() == nil {
		s.once.Do(func() { s.wire.failure("stream_ended", s.method, s.begun, err) })
	}
	return err
}

// Dial is how every connection of a client begins that is asked where it goes.
func (w *wire) dial(ctx context.Context, address string) (net.Conn, error) {
	w.count(w.dialed, address)
	return (&net.Dialer{}).DialContext(ctx, "tcp", address)
}

func (w *wire) report() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	emit("wire", fields{
		"attempts": w.attempts, "streams": w.streams, "failed": w.failed, "dialed": w.dialed,
		"authenticate": w.attempts["/etcdserverpb.Auth/Authenticate"],
	})
}
