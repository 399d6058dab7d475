// Many watches, each on a stream of its own, so each with a token just obtained (clientv3 logs in before opening a stream).
package main

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
)

type watchStorm struct {
	*options
	watches, parallel int
	limit             time.Duration

	created, refused, silent atomic.Int64
	delivered                atomic.Int64
}

func watchStormScenario(flags *flag.FlagSet, o *options) func() error {
	s := &watchStorm{options: o}
	flags.IntVar(&s.watches, "watches", 300, "watches to create")
	flags.IntVar(&s.parallel, "parallel", 1, "creates in flight")
	flags.DurationVar(&s.limit, "limit", 15*time.Second, "how long a create or the last event may take")
	return s.run
}

func (s *watchStorm) run() error {
	client, err := s.dial()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	numbers := make(chan int)
	var creators, watchers sync.WaitGroup
	for range s.parallel {
		creators.Go(func() {
			for number := range numbers {
				s.watch(ctx, client, number, &watchers)
			}
		})
	}
	for number := range s.watches {
		numbers <- number
	}
	close(numbers)
	creators.Wait()

	begun := elapsed()
	if _, err := client.Put(ctx, s.prefix+"last", "last"); err != nil {
		emitError("put", begun, err, nil)
	}
	all := make(chan struct{})
	go func() { watchers.Wait(); close(all) }()
	select {
	case <-all:
	case <-time.After(s.limit):
	}
	emit("summary", fields{
		"created": s.created.Load(), "refused": s.refused.Load(), "silent": s.silent.Load(), "delivered": s.delivered.Load(),
	})
	return nil
}

// Watch creates one watch; where that worked, it goes on in `watchers` until its first event.
func (s *watchStorm) watch(ctx context.Context, client *clientv3.Client, number int, watchers *sync.WaitGroup) {
	begun := elapsed()
	// clientv3 keeps one stream for each distinct metadata.
	own := metadata.AppendToOutgoingContext(ctx, "kwclient-watch", fmt.Sprint(number))
	channel := client.Watch(own, s.prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	select {
	case response, open := <-channel:
		err := response.Err()
		if !open {
			err = errChannelClosed
		}
		if err != nil {
			s.refused.Add(1)
			emitError("watch", begun, err, fields{"watch": number})
			return
		}
		s.created.Add(1)
		emit("created", fields{"watch": number, "start": begun, "end": elapsed()})
	case <-time.After(s.limit):
		s.silent.Add(1)
		emit("silent", fields{"watch": number, "start": begun, "end": elapsed()})
		return
	}
	watchers.Go(func() {
		for response := range channel {
			if err := response.Err(); err != nil {
				emitError("watch", begun, err, fields{"watch": number})
			}
			if len(response.Events) > 0 {
				s.delivered.Add(1)
				return
			}
		}
	})
}
