// Rounds: one client that logs in once, holds a watch and a lease, and for each SIGUSR2 does what an application does, one thing
// of each kind. Between rounds it is idle, or its endpoint moves: tests/etcd says. The contract of the lines is in ../README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	opLimit   = 10 * time.Second
	roundsTTL = 600
)

type roundsRun struct {
	*options
	client *clientv3.Client
	lease  clientv3.LeaseID

	mutex   sync.Mutex
	changed chan struct{} // closed, and made anew, whenever one of these changes
	shown   map[string]bool
	ended   error // why the standing watch ended
	lost    error // why the standing keepalive ended
}

func roundsScenario(_ *flag.FlagSet, o *options) func() error {
	r := &roundsRun{options: o, changed: make(chan struct{}), shown: map[string]bool{}}
	return r.run
}

func (r *roundsRun) run() error {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGUSR2, syscall.SIGTERM)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if err := r.setUp(ctx); err != nil {
		return err
	}
	emit("ready", fields{})
	for number := 1; <-signals == syscall.SIGUSR2; number++ {
		r.did(number, "watch", func(ctx context.Context) error { return r.shows(ctx, fmt.Sprint(number)) })
		r.did(number, "new watch", r.watchSeed)
		r.did(number, "read", func(ctx context.Context) error {
			_, err := r.client.Get(ctx, r.prefix+"seed")
			return err
		})
		r.did(number, "write", func(ctx context.Context) error {
			_, err := r.client.Put(ctx, r.prefix+"written", fmt.Sprint(number))
			return err
		})
		r.did(number, "keepalive", r.renew)
		r.did(number, "grant", func(ctx context.Context) error {
			_, err := r.client.Grant(ctx, roundsTTL)
			return err
		})
		emit("round", fields{"round": number})
	}
	return nil
}

func (r *roundsRun) setUp(ctx context.Context) (err error) {
	if r.client, err = r.dial(); err != nil {
		return err
	}
	if _, err = r.client.Put(ctx, r.prefix+"seed", "seed"); err != nil {
		return err
	}
	granted, err := r.client.Grant(ctx, roundsTTL)
	if err != nil {
		return err
	}
	r.lease = granted.ID
	answers, err := r.client.KeepAlive(ctx, r.lease)
	if err != nil {
		return err
	}
	go func() {
		for range answers {
		}
		r.change(func() { r.lost = errChannelClosed })
	}()
	created := make(chan struct{})
	go r.watch(ctx, created)
	if !answered(created, opLimit) {
		return errors.New("the watch was not created")
	}
	return nil
}

func (r *roundsRun) watch(ctx context.Context, created chan struct{}) {
	ended := errChannelClosed
	for response := range r.client.Watch(ctx, r.prefix+"watched", clientv3.WithCreatedNotify()) {
		if err := response.Err(); err != nil {
			ended = err
			continue
		}
		if response.Created {
			close(created)
		}
		for _, event := range response.Events {
			r.change(func() { r.shown[string(event.Kv.Value)] = true })
		}
	}
	r.change(func() { r.ended = ended })
}

func (r *roundsRun) change(what func()) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	what()
	close(r.changed)
	r.changed = make(chan struct{})
}

// Shows waits until the standing watch has shown a value.
func (r *roundsRun) shows(ctx context.Context, value string) error {
	for {
		r.mutex.Lock()
		shown, ended, changed := r.shown[value], r.ended, r.changed
		r.mutex.Unlock()
		if shown || ended != nil {
			return ended
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *roundsRun) watchSeed(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for response := range r.client.Watch(ctx, r.prefix+"seed", clientv3.WithRev(1)) {
		if err := response.Err(); err != nil {
			return err
		}
		if len(response.Events) > 0 {
			return nil
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return errChannelClosed
}

func (r *roundsRun) renew(ctx context.Context) error {
	if _, err := r.client.KeepAliveOnce(ctx, r.lease); err != nil {
		return err
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.lost
}

func (r *roundsRun) did(round int, op string, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	begun := elapsed()
	err := do(ctx)
	code, message := describe(err)
	if err != nil && ctx.Err() != nil {
		code, message = "Timeout", "" // whatever clientv3 makes of its own context
	}
	emit("did", fields{"round": round, "op": op, "code": code, "message": message, "ms": elapsed() - begun})
}
