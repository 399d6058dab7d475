// The watchers and the leases of the load. Where clientv3 gives up and closes a channel, they do what a careful application
// does: say so, and open it again where they were.
package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const reopenAfter = 100 * time.Millisecond

type watcher struct {
	name, prefix string
	client       *clientv3.Client
	trace        bool

	mutex  sync.Mutex
	events []event
	last   int64 // revision of the last event
	closed int   // channels that clientv3 closed on us
}

func (l *load) startWatchers(ctx context.Context) ([]*watcher, error) {
	all := make([]*watcher, l.watchers)
	ready := make(chan struct{}, l.watchers)
	for i := range all {
		prefix := l.prefix + "w/"
		if l.own {
			prefix = l.shard(i)
		}
		all[i] = &watcher{name: fmt.Sprintf("w%d", i), prefix: prefix, client: l.pool[i%len(l.pool)], trace: l.trace}
		go all[i].run(ctx, ready)
	}
	for range all {
		select {
		case <-ready:
		case <-time.After(l.settle):
			return nil, fmt.Errorf("a watch was not created in %v", l.settle)
		}
	}
	return all, nil
}

func (w *watcher) run(ctx context.Context, ready chan<- struct{}) {
	next, once := int64(0), sync.Once{} // 0: from now
	for ctx.Err() == nil {
		begun := elapsed()
		inner, cancel := context.WithCancel(ctx)
		options := []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithCreatedNotify(), clientv3.WithRev(next)}
		told := false
		for response := range w.client.Watch(inner, w.prefix, options...) {
			if err := response.Err(); err != nil {
				told = true
				emitError("watch", begun, err, fields{"watcher": w.name})
				continue
			}
			if response.Created {
				next = max(next, response.Header.Revision+1)
				once.Do(func() { ready <- struct{}{} })
			}
			next = max(next, w.record(response.Events)+1)
		}
		cancel()
		if ctx.Err() != nil {
			return
		}
		if !told {
			emitError("watch", begun, errChannelClosed, fields{"watcher": w.name})
		}
		w.mutex.Lock()
		w.closed++
		w.mutex.Unlock()
		emit("watch_closed", fields{"watcher": w.name, "next": next})
		time.Sleep(reopenAfter)
	}
}

func (w *watcher) record(events []*clientv3.Event) (last int64) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, e := range events {
		w.events = append(w.events, event{string(e.Kv.Key), string(e.Kv.Value), e.Kv.ModRevision})
		w.last = max(w.last, e.Kv.ModRevision)
		if w.trace {
			emit("event", fields{"watcher": w.name, "key": string(e.Kv.Key), "value": string(e.Kv.Value), "revision": e.Kv.ModRevision})
		}
	}
	return w.last
}

func (w *watcher) report() view {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	emit("watcher", fields{"watcher": w.name, "prefix": w.prefix, "events": len(w.events), "closed": w.closed, "last": w.last})
	return view{w.name, w.prefix, w.events}
}

// Settled waits until every watcher has its sentinel, and returns how many still lack it.
func settled(watchers []*watcher, sentinels []int64, limit time.Duration) int {
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		behind := 0
		for i, w := range watchers {
			w.mutex.Lock()
			if w.last < sentinels[i] {
				behind++
			}
			w.mutex.Unlock()
		}
		if behind == 0 || time.Now().After(end) {
			return behind
		}
	}
}

// A keeper holds one lease with one key, and keeps it alive.
type keeper struct {
	client *clientv3.Client
	lease  clientv3.LeaseID
	key    string

	mutex             sync.Mutex
	responses, closed int
	lowest, widest    int64 // lowest TTL told, widest gap between two answers in ms
}

func (l *load) startKeepers(ctx context.Context) ([]*keeper, error) {
	all := make([]*keeper, l.leases)
	for i := range all {
		client := l.pool[i%len(l.pool)]
		granted, err := client.Grant(ctx, l.ttl)
		if err != nil {
			return nil, err
		}
		all[i] = &keeper{client: client, lease: granted.ID, key: fmt.Sprintf("%sl/%d", l.prefix, i), lowest: granted.TTL}
		if _, err := client.Put(ctx, all[i].key, "kept", clientv3.WithLease(granted.ID)); err != nil {
			return nil, err
		}
		go all[i].run(ctx)
	}
	return all, nil
}

func (k *keeper) run(ctx context.Context) {
	last := elapsed()
	for ctx.Err() == nil {
		begun := elapsed()
		answers, err := k.client.KeepAlive(ctx, k.lease)
		for answer := range answers {
			k.answered(answer.TTL, last)
			last = elapsed()
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errChannelClosed
		}
		k.mutex.Lock()
		k.closed++
		k.mutex.Unlock()
		emitError("keepalive", begun, err, fields{"lease": fmt.Sprintf("%x", k.lease)})
		time.Sleep(reopenAfter)
	}
}

func (k *keeper) answered(ttl, last int64) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	gap := elapsed() - last
	k.responses++
	k.lowest, k.widest = min(k.lowest, ttl), max(k.widest, gap)
	emit("keepalive", fields{"lease": fmt.Sprintf("%x", k.lease), "ttl": ttl, "gap": gap})
}

// Report tells whether the lease lived: it has time left and its key is there.
func (k *keeper) report() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	begun := elapsed()
	left, err := k.client.TimeToLive(ctx, k.lease)
	there := false
	if err == nil {
		var found *clientv3.GetResponse
		found, err = k.client.Get(ctx, k.key)
		there = err == nil && len(found.Kvs) == 1
	}
	if err != nil {
		emitError("lease_check", begun, err, fields{"lease": fmt.Sprintf("%x", k.lease)})
	}
	alive := err == nil && left.TTL > 0 && there
	k.mutex.Lock()
	defer k.mutex.Unlock()
	emit("lease", fields{
		"lease": fmt.Sprintf("%x", k.lease), "alive": alive, "responses": k.responses, "closed": k.closed,
		"lowest_ttl": k.lowest, "widest_gap": k.widest,
	})
	return alive
}
