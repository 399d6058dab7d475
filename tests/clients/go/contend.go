// Recipes that wait for somebody else: a client that has had a watch open for longer than its token lives waits for a
// Barrier, Mutex or Election that another client holds, and must get it after the release, not before and not never.
package main

import (
	"context"
	"errors"
	"flag"
	"os/signal"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	recipe "go.etcd.io/etcd/client/v3/experimental/recipes"
)

// Contest is one recipe: what the holder does, and what the waiter does meanwhile.
type contest struct {
	hold, release, wait func(context.Context) error
}

type contendRun struct {
	*options
	age, hold, limit time.Duration
	open             func(holder, waiter *clientv3.Client, key string) contest
}

func barrierScenario(flags *flag.FlagSet, o *options) func() error {
	return newContendRun(flags, o, func(holder, waiter *clientv3.Client, key string) contest {
		held, awaited := recipe.NewBarrier(holder, key), recipe.NewBarrier(waiter, key)
		return contest{
			hold:    func(context.Context) error { return held.Hold() },
			release: func(context.Context) error { return held.Release() },
			wait:    func(context.Context) error { return awaited.Wait() },
		}
	})
}

func mutexScenario(flags *flag.FlagSet, o *options) func() error {
	return newContendRun(flags, o, func(holder, waiter *clientv3.Client, key string) contest {
		var held *concurrency.Mutex
		return contest{
			hold: inSession(holder, func(ctx context.Context, session *concurrency.Session) error {
				held = concurrency.NewMutex(session, key)
				return held.Lock(ctx)
			}),
			release: func(ctx context.Context) error { return held.Unlock(ctx) },
			wait: inSession(waiter, func(ctx context.Context, session *concurrency.Session) error {
				return concurrency.NewMutex(session, key).Lock(ctx)
			}),
		}
	})
}

func electionScenario(flags *flag.FlagSet, o *options) func() error {
	return newContendRun(flags, o, func(holder, waiter *clientv3.Client, key string) contest {
		var held *concurrency.Election
		return contest{
			hold: inSession(holder, func(ctx context.Context, session *concurrency.Session) error {
				held = concurrency.NewElection(session, key)
				return held.Campaign(ctx, "holder")
			}),
			release: func(ctx context.Context) error { return held.Resign(ctx) },
			wait: inSession(waiter, func(ctx context.Context, session *concurrency.Session) error {
				return concurrency.NewElection(session, key).Campaign(ctx, "waiter")
			}),
		}
	})
}

func inSession(client *clientv3.Client, act func(context.Context, *concurrency.Session) error) func(context.Context) error {
	return func(ctx context.Context) error {
		session, err := concurrency.NewSession(client, concurrency.WithTTL(30))
		if err != nil {
			return err
		}
		return act(ctx, session)
	}
}

func newContendRun(flags *flag.FlagSet, o *options, open func(_, _ *clientv3.Client, _ string) contest) func() error {
	c := &contendRun{options: o, open: open}
	flags.DurationVar(&c.age, "age", 7*time.Second, "how long the waiter's client has a watch open before; longer than the token TTL")
	flags.DurationVar(&c.hold, "hold", 3*time.Second, "time from the start of the wait to the release; 0: until SIGTERM")
	flags.DurationVar(&c.limit, "limit", 15*time.Second, "how long after the release the waiter may take")
	return c.run
}

func (c *contendRun) run() error {
	clients, err := c.dialSome(2)
	if err != nil {
		return err
	}
	holder, waiter := clients[0], clients[1]
	contest := c.open(holder, waiter, c.prefix+"held")
	if err := contest.hold(context.Background()); err != nil {
		return err
	}
	emit("held", fields{})
	aged, err := openAgedWatch(waiter, c.prefix+"aged")
	if err != nil {
		return err
	}
	time.Sleep(c.age)

	ctx, cancel := context.WithCancel(context.Background())
	if c.hold > 0 {
		ctx, cancel = context.WithTimeout(context.Background(), c.hold+c.limit)
	}
	defer cancel()
	returned := make(chan int64, 1)
	var outcome error
	begun := elapsed()
	emit("wait_called", fields{})
	go func() {
		defer recordPanic()
		outcome = contest.wait(ctx)
		emit("wait_returned", fields{"ok": outcome == nil})
		returned <- elapsed()
	}()
	c.held()
	releasing := elapsed()
	emit("release_called", fields{})
	if err := contest.release(context.Background()); err != nil {
		emitError("release", releasing, err, nil)
	}
	result := fields{"result": "timeout", "early": false, "code": "", "message": ""}
	select {
	case at := <-returned:
		code, message := describe(outcome)
		result = fields{"result": "ok", "early": outcome == nil && at < releasing, "code": code, "message": message, "waited": at - begun}
		if outcome != nil {
			result["result"] = "error"
		}
	case <-time.After(c.limit):
	}
	result["aged_watch_alive"] = aged.delivers(holder)
	emit("summary", result)
	return nil
}

// Held returns when it is time for the release.
func (c *contendRun) held() {
	if c.hold > 0 {
		time.Sleep(c.hold)
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
}

// AgedWatch keeps the client's default watch stream, and so that stream's token, in use.
type agedWatch struct {
	key    string
	events chan struct{}
}

func openAgedWatch(client *clientv3.Client, key string) (*agedWatch, error) {
	channel := client.Watch(context.Background(), key, clientv3.WithCreatedNotify())
	select {
	case first, open := <-channel:
		if err := first.Err(); err != nil {
			return nil, err
		}
		if !open {
			return nil, errChannelClosed
		}
	case <-time.After(10 * time.Second):
		return nil, errors.New("the first watch was not created in 10 s")
	}
	aged := &agedWatch{key, make(chan struct{}, 16)}
	go func() {
		begun := elapsed()
		for response := range channel {
			if err := response.Err(); err != nil {
				emitError("aged_watch", begun, err, nil)
			}
			if len(response.Events) > 0 {
				aged.events <- struct{}{}
			}
		}
		emit("aged_watch_closed", fields{})
	}()
	return aged, nil
}

// Delivers tells whether a put by another client still reaches the watch.
func (a *agedWatch) delivers(other *clientv3.Client) bool {
	begun := elapsed()
	if _, err := other.Put(context.Background(), a.key, "alive"); err != nil {
		emitError("put", begun, err, nil)
		return false
	}
	select {
	case <-a.events:
		return true
	case <-time.After(3 * time.Second):
		return false
	}
}
