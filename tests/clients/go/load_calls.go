// The unary calls of the load: paced, never waiting for each other, each write with a value of its own.
package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

func (l *load) callUntil(ended <-chan struct{}) {
	pace := time.NewTicker(time.Duration(float64(time.Second) / l.rate))
	defer pace.Stop()
	var open sync.WaitGroup
	defer open.Wait()
	for number := 0; ; number++ {
		select {
		case <-ended:
			return
		case <-pace.C:
			open.Go(func() { l.call(number) })
		}
	}
}

// CallInTurnUntil has writers and readers that each wait for one call before they make the next: a writer has at most one write in
// flight, and keys of its own. And a client of its own: clientv3 forgets its token before it asks for another, so what else is called
// on that client meanwhile shows none, and clientv3 before 3.5.2 gives that error to the application.
func (l *load) callInTurnUntil(ended <-chan struct{}) {
	each := time.Duration(float64(2*l.writers) / l.rate * float64(time.Second))
	var open sync.WaitGroup
	for i := range 2 * l.writers {
		open.Go(func() {
			pace := time.NewTicker(each)
			defer pace.Stop()
			for number := 0; ; number++ {
				select {
				case <-ended:
					return
				case <-pace.C:
					l.callInTurn(l.turns[i], i/2, number, i%2 == 0)
				}
			}
		})
	}
	open.Wait()
}

func (l *load) callInTurn(client *clientv3.Client, writer, number int, writes bool) {
	ctx, cancel := context.WithTimeout(context.Background(), l.callLimit)
	defer cancel()
	key := fmt.Sprintf("%swriter-%d", l.shard(writer%l.watchers), writer)
	switch {
	case writes:
		l.put(ctx, client, fmt.Sprintf("v-%d-%d-%d", started.UnixNano(), writer, number), key)
	case number%2 == 0:
		l.get(ctx, client, key)
	default:
		begun := elapsed()
		_, err := client.Get(ctx, key, clientv3.WithSerializable())
		l.done("serializable_get", begun, err, key)
	}
}

func (l *load) call(number int) {
	client := l.pool[number%len(l.pool)]
	ctx, cancel := context.WithTimeout(context.Background(), l.callLimit)
	defer cancel()
	key := l.key(number)
	switch number % 10 {
	case 0, 1, 2, 3:
		l.put(ctx, client, fmt.Sprintf("v-%d-%d", started.UnixNano(), number), key)
	case 4, 5:
		l.get(ctx, client, key)
	case 6, 7:
		begun := elapsed()
		_, err := client.Get(ctx, key, clientv3.WithSerializable())
		l.done("serializable_get", begun, err, key)
	default:
		other := l.key(number*7 + 1)
		if other == key {
			other += "-other" // etcd refuses a Txn that puts one key twice
		}
		l.put(ctx, client, fmt.Sprintf("v-%d-%d", started.UnixNano(), number), key, other)
	}
}

func (l *load) key(number int) string {
	return fmt.Sprintf("%sk%d", l.shard(number/10%l.watchers), number/3%l.keys)
}

// Put writes one value to the keys at one revision: a Put for one key, a Txn for more. It returns that revision, 0 on error.
func (l *load) put(ctx context.Context, client *clientv3.Client, value string, keys ...string) int64 {
	l.ledger.issued(value, keys...)
	begun := elapsed()
	var err error
	revision, op := int64(0), "put"
	if len(keys) == 1 {
		var response *clientv3.PutResponse
		if response, err = client.Put(ctx, keys[0], value); err == nil {
			revision = response.Header.Revision
		}
	} else {
		op = "txn"
		puts := make([]clientv3.Op, len(keys))
		for i, key := range keys {
			puts[i] = clientv3.OpPut(key, value)
		}
		var response *clientv3.TxnResponse
		if response, err = client.Txn(ctx).Then(puts...).Commit(); err == nil {
			revision = response.Header.Revision
		}
	}
	l.done(op, begun, err, keys...)
	if err == nil {
		l.ledger.acknowledged(value, revision)
		emit("put", fields{"keys": keys, "value": value, "revision": revision})
	}
	return revision
}

func (l *load) get(ctx context.Context, client *clientv3.Client, key string) {
	floor := l.ledger.floor(key)
	begun := elapsed()
	response, err := client.Get(ctx, key)
	l.done("get", begun, err, key)
	if err != nil || floor == 0 {
		return
	}
	if len(response.Kvs) == 0 || response.Kvs[0].ModRevision < floor {
		l.stale.Add(1)
		emit("stale_read", fields{"key": key, "floor": floor, "header_revision": response.Header.Revision, "start": begun})
	}
}

func (l *load) done(op string, begun int64, err error, keys ...string) {
	outcome := " ok"
	if err != nil {
		outcome = " error"
		emitError(op, begun, err, fields{"keys": keys})
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.counts[op+outcome]++
}

// Sentinels puts a last key below every prefix: a watcher that has its own has all. It returns their revisions, in order.
func (l *load) sentinels() []int64 {
	last := make([]int64, l.watchers)
	for i := range last {
		for try := 0; try < 5 && last[i] == 0; try++ {
			ctx, cancel := context.WithTimeout(context.Background(), l.callLimit)
			last[i] = l.put(ctx, l.pool[0], fmt.Sprintf("end-%d-%d-%d", started.UnixNano(), i, try), l.shard(i)+"end")
			cancel()
		}
	}
	return last
}
