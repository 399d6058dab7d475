// A steady load: watchers, leases kept alive and unary calls, with every error that the application sees, and at the end the
// ledger's verdict. The Rust side makes the faults meanwhile: it waits for `ready`, and ends the run by time, SIGTERM or stdin.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
)

const violationsPrinted = 50

type load struct {
	*options
	watchers, leases, clients, keys int
	writers                         int
	rate                            float64
	length                          time.Duration
	ttl                             int64
	own, trace                      bool
	callLimit, settle               time.Duration
	history, namespace              string

	pool   []*clientv3.Client
	turns  []*clientv3.Client // one for each that calls in turn
	ledger *ledger
	stale  atomic.Int64
	mutex  sync.Mutex
	counts map[string]int // calls by "op ok" and "op error"
}

func loadScenario(flags *flag.FlagSet, o *options) func() error {
	l := &load{options: o, ledger: newLedger(), counts: map[string]int{}}
	flags.IntVar(&l.watchers, "watchers", 20, "watchers")
	flags.IntVar(&l.leases, "leases", 20, "leases, each kept alive and holding a key")
	flags.IntVar(&l.clients, "clients", 4, "clients (connections) that share all this; watchers of a client share a stream")
	flags.IntVar(&l.keys, "keys", 10, "keys below each watcher's own prefix")
	flags.IntVar(&l.writers, "writers", 0, "instead of paced calls so many writers and as many readers, each with a client of its own and one call at a time, together at --rate")
	flags.Float64Var(&l.rate, "rate", 50, "unary calls a second: 40% put, 20% linearizable and 20% serializable get, 20% txn of two puts")
	flags.DurationVar(&l.length, "length", time.Minute, "length of the calls; 0: until stdin closes. SIGTERM always ends them")
	flags.Int64Var(&l.ttl, "ttl", 10, "lease TTL in seconds")
	flags.BoolVar(&l.own, "own", false, "each watcher watches its own prefix, not all the same one")
	flags.BoolVar(&l.trace, "trace", false, "print every event of every watcher")
	flags.DurationVar(&l.callLimit, "call-limit", 20*time.Second, "deadline of a unary call")
	flags.DurationVar(&l.settle, "settle", 20*time.Second, "how long after the calls the watchers may take to catch up")
	flags.StringVar(&l.history, "history", "", "endpoints to read the history from at the end (an etcd member); default: --endpoints")
	flags.StringVar(&l.namespace, "namespace", "", "prefix that the server gives the user, below which --history has the keys")
	return l.run
}

func (l *load) run() error {
	if l.watchers < 1 || l.clients < 1 || l.keys < 1 || l.rate <= 0 || !strings.HasSuffix(l.prefix, "/") {
		return errors.New("load needs a watcher, a client, a key and a rate, and a --prefix that ends in a slash")
	}
	var err error
	if l.pool, err = l.dialSome(l.clients); err != nil {
		return err
	}
	if l.turns, err = l.dialSome(2 * l.writers); err != nil {
		return err
	}
	first, err := l.pool[0].Get(context.Background(), l.prefix)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	watchers, err := l.startWatchers(ctx)
	if err != nil {
		return err
	}
	keepers, err := l.startKeepers(ctx)
	if err != nil {
		return err
	}
	// Before it says that it is ready: whoever waits for that sends signals.
	asked, ended := make(chan os.Signal, 16), l.ended()
	signal.Notify(asked, syscall.SIGUSR1)
	go l.tellSoFar(asked, watchers, keepers)
	emit("ready", fields{"revision": first.Header.Revision})
	if l.writers > 0 {
		l.callInTurnUntil(ended)
	} else {
		l.callUntil(ended)
	}
	emit("calls_done", fields{})

	sentinels := l.sentinels()
	behind := settled(watchers, sentinels, l.settle)
	history, err := l.readHistory(first.Header.Revision+1, slices.Max(sentinels))
	if err != nil {
		return fmt.Errorf("the history could not be read, so there is no verdict: %w", err)
	}
	cancel()
	lost := 0
	for _, k := range keepers {
		if !k.report() {
			lost++
		}
	}
	l.summary(watchers, behind, history, lost)
	return nil
}

// TellSoFar prints what was done until now, each time that it is asked.
func (l *load) tellSoFar(asked <-chan os.Signal, watchers []*watcher, keepers []*keeper) {
	for range asked {
		events, renewed := 0, 0
		for _, w := range watchers {
			w.mutex.Lock()
			events += len(w.events)
			w.mutex.Unlock()
		}
		for _, k := range keepers {
			k.mutex.Lock()
			renewed += k.responses
			k.mutex.Unlock()
		}
		l.mutex.Lock()
		emit("so_far", fields{"calls": l.counts, "events": events, "keepalives": renewed})
		l.mutex.Unlock()
	}
}

// Ended is closed when the calls are to stop.
func (l *load) ended() <-chan struct{} {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	if l.length > 0 {
		time.AfterFunc(l.length, stop)
	} else {
		go func() {
			io.Copy(io.Discard, os.Stdin)
			stop()
		}()
	}
	return ctx.Done()
}

func (l *load) shard(i int) string { return fmt.Sprintf("%sw/%d/", l.prefix, i) }

// ReadHistory replays from etcd what happened below the watched prefix, on a client of its own: the others may be stale.
func (l *load) readHistory(from, to int64) (*view, error) {
	endpoints := l.endpoints
	if l.history != "" {
		endpoints = l.history
	}
	client, err := l.dialTo(endpoints)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	all := &view{watcher: "history", prefix: l.prefix + "w/"}
	for range 5 { // a direct watch may meet a member that does not know the new token yet
		if all.events, err = replay(namespace.NewWatcher(client, l.namespace), all.prefix, from, to, l.settle); err == nil {
			return all, nil
		}
	}
	return nil, err
}

func replay(client clientv3.Watcher, prefix string, from, to int64, limit time.Duration) ([]event, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var events []event
	for response := range client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(from)) {
		if err := response.Err(); err != nil {
			return nil, err
		}
		for _, e := range response.Events {
			events = append(events, event{string(e.Kv.Key), string(e.Kv.Value), e.Kv.ModRevision})
		}
		if len(events) > 0 && events[len(events)-1].revision >= to {
			return events, nil
		}
	}
	return events, errChannelClosed
}

func (l *load) summary(watchers []*watcher, behind int, history *view, lost int) {
	views := make([]view, len(watchers))
	closed := 0
	for i, w := range watchers {
		views[i] = w.report()
		closed += w.closed
	}
	violations := l.ledger.verify(views, *history)
	kinds := map[string]int{}
	for _, v := range violations {
		kinds[v.Kind]++
	}
	emit("verify", fields{
		"violations": len(violations), "by_kind": kinds, "first": violations[:min(len(violations), violationsPrinted)],
		"history": len(history.events), "stale_reads": l.stale.Load(),
	})
	acknowledged, ambiguous, applied := l.ledger.outcome(history.events)
	l.mutex.Lock()
	defer l.mutex.Unlock()
	emit("summary", fields{
		"acknowledged": acknowledged, "ambiguous": ambiguous, "ambiguous_applied": applied, "calls": l.counts,
		"watchers": len(watchers), "watches_closed": closed, "watchers_behind": behind,
		"leases": l.leases, "leases_lost": lost, "violations": len(violations), "stale_reads": l.stale.Load(),
	})
}
