// Sync: clients whose endpoints follow the member list (--auto-sync), each with a watch, a lease and calls in turn. What they dial and
// what their endpoints become is told; every error that the application sees is an `error` line.
package main

import (
	"context"
	"flag"
	"fmt"
	"sort"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	syncClients = 4
	syncTTL     = 5
	syncLimit   = 20 * time.Second
)

type syncRun struct {
	*options
	length time.Duration

	mutex  sync.Mutex
	counts map[string]int // by "op ok" and "op error"
	lists  map[string]int // rounds in which a client had these endpoints
}

func syncScenario(flags *flag.FlagSet, o *options) func() error {
	r := &syncRun{options: o, counts: map[string]int{}, lists: map[string]int{}}
	flags.DurationVar(&r.length, "length", 10*time.Second, "length of the calls")
	return r.run
}

func (r *syncRun) run() error {
	if r.autoSync <= 0 {
		return fmt.Errorf("sync needs --auto-sync")
	}
	clients, err := r.dialSome(syncClients)
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(context.Background(), r.length)
	defer stop()
	var all sync.WaitGroup
	for number, client := range clients {
		all.Add(1)
		go func() {
			defer all.Done()
			r.turns(ctx, client, fmt.Sprintf("%s%d/", r.prefix, number))
		}()
	}
	emit("ready", fields{})
	all.Wait()
	for _, client := range clients {
		r.did("close", elapsed(), client.Close())
	}
	emit("summary", fields{"calls": r.counts, "endpoints": r.lists})
	return nil
}

// Turns does one thing after the other until the time is over.
func (r *syncRun) turns(over context.Context, client *clientv3.Client, prefix string) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	written, shown := 0, make(chan int, 1)
	go r.watch(ctx, client, prefix+"put", shown)
	begun := elapsed()
	lease, err := client.Grant(ctx, syncTTL)
	r.did("grant", begun, err)
	if err == nil {
		answers, err := client.KeepAlive(ctx, lease.ID)
		r.did("keepalive", begun, err)
		go func() {
			for range answers {
			}
			if ctx.Err() == nil {
				r.did("keepalive", begun, errChannelClosed)
			}
		}()
	}
	for over.Err() == nil {
		r.call("put", func(ctx context.Context) error {
			_, err := client.Put(ctx, prefix+"put", fmt.Sprint(written))
			if err == nil {
				written++
			}
			return err
		})
		r.call("get", func(ctx context.Context) error {
			_, err := client.Get(ctx, prefix+"put")
			return err
		})
		r.call("serializable", func(ctx context.Context) error {
			_, err := client.Get(ctx, prefix+"put", clientv3.WithSerializable())
			return err
		})
		r.call("txn", func(ctx context.Context) error {
			_, err := client.Txn(ctx).Then(clientv3.OpPut(prefix+"txn", "v"), clientv3.OpGet(prefix+"put")).Commit()
			return err
		})
		endpoints := client.Endpoints()
		sort.Strings(endpoints)
		r.count(r.lists, strings.Join(endpoints, " "))
		time.Sleep(50 * time.Millisecond)
	}
	r.call("watch", func(ctx context.Context) error {
		for {
			select {
			case seen, open := <-shown:
				if !open {
					return errChannelClosed
				}
				if seen+1 >= written {
					return nil
				}
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
}

// Watch tells the highest value that it has seen, and closes the channel when it ends.
func (r *syncRun) watch(ctx context.Context, client *clientv3.Client, key string, shown chan int) {
	defer close(shown)
	begun := elapsed()
	for response := range client.Watch(ctx, key, clientv3.WithRev(1)) {
		if err := response.Err(); err != nil {
			r.did("watch", begun, err)
		}
		for _, event := range response.Events {
			var seen int
			fmt.Sscan(string(event.Kv.Value), &seen)
			select { // the newest only
			case <-shown:
			default:
			}
			shown <- seen
		}
	}
}

func (r *syncRun) call(op string, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), syncLimit)
	defer cancel()
	begun := elapsed()
	r.did(op, begun, do(ctx))
}

func (r *syncRun) did(op string, begun int64, err error) {
	if err == nil {
		r.count(r.counts, op+" ok")
		return
	}
	r.count(r.counts, op+" error")
	emitError(op, begun, err, nil)
}

func (r *syncRun) count(into map[string]int, name string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	into[name]++
}
