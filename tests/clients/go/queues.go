// Story 1: two workers take items from the recipe Queue (or PriorityQueue) on one client, the second one starting when the
// token of the first one's watch stream is dead. Started on an empty queue, so that both open a watch.
package main

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	recipe "go.etcd.io/etcd/client/v3/experimental/recipes"
)

// WorkQueue is the common part of the two recipes.
type workQueue struct {
	enqueue func(number int, item string) error
	dequeue func() (string, error)
}

type queueRun struct {
	*options
	workers, items   int
	over, gap, grace time.Duration
	open             func(*clientv3.Client, string) workQueue
}

func queueScenario(flags *flag.FlagSet, o *options) func() error {
	return newQueueRun(flags, o, func(client *clientv3.Client, prefix string) workQueue {
		queue := recipe.NewQueue(client, prefix)
		return workQueue{func(_ int, item string) error { return queue.Enqueue(item) }, queue.Dequeue}
	})
}

func priorityQueueScenario(flags *flag.FlagSet, o *options) func() error {
	return newQueueRun(flags, o, func(client *clientv3.Client, prefix string) workQueue {
		queue := recipe.NewPriorityQueue(client, strings.TrimSuffix(prefix, "/"))
		return workQueue{func(number int, item string) error { return queue.Enqueue(item, uint16(number%3)) }, queue.Dequeue}
	})
}

func newQueueRun(flags *flag.FlagSet, o *options, open func(*clientv3.Client, string) workQueue) func() error {
	q := &queueRun{options: o, open: open}
	flags.IntVar(&q.workers, "workers", 2, "dequeuers, all on one client")
	flags.IntVar(&q.items, "items", 100, "items to enqueue")
	flags.DurationVar(&q.gap, "gap", 6*time.Second, "time from the first dequeuer's watch to the start of the second; etcd drops a token up to 1 s late")
	flags.DurationVar(&q.over, "over", 60*time.Second, "time over which the items are enqueued, after the last dequeuer's start")
	flags.DurationVar(&q.grace, "grace", 10*time.Second, "how long to wait for an item after the last enqueue")
	return q.run
}

func (q *queueRun) run() error {
	if !strings.HasSuffix(q.prefix, "/") {
		return errors.New("--prefix must end in a slash")
	}
	clients, err := q.dialSome(2)
	if err != nil {
		return err
	}
	t := &tally{delivered: map[string]int{}}
	for i := range q.workers {
		emit("worker", fields{"worker": i})
		go t.work(i, q.open(clients[0], q.prefix))
		if i == 0 && !answered(seen.watching, q.grace) {
			return errors.New("the first dequeuer's watch was not answered")
		}
		if i < q.workers-1 {
			time.Sleep(q.gap)
		}
	}
	time.Sleep(time.Second) // the last dequeuer waits on the empty queue too
	t.produce(q.open(clients[1], q.prefix), q.items, q.over)
	t.drain(q.grace)
	t.report()
	return nil // with the clients open: closing one makes a blocked Dequeue panic
}

func answered(channel <-chan struct{}, limit time.Duration) bool {
	select {
	case <-channel:
		return true
	case <-time.After(limit):
		return false
	}
}

// Tally is what was put in and what came out.
type tally struct {
	mutex               sync.Mutex
	enqueued, ambiguous []string
	delivered           map[string]int
	failures            int
}

func (t *tally) work(worker int, queue workQueue) {
	defer recordPanic()
	for {
		begun := elapsed()
		item, err := queue.dequeue()
		t.mutex.Lock()
		if err == nil {
			t.delivered[item]++
		} else {
			t.failures++
		}
		t.mutex.Unlock()
		if err == nil {
			emit("item", fields{"worker": worker, "item": item})
			continue
		}
		emitError("dequeue", begun, err, fields{"worker": worker})
		time.Sleep(100 * time.Millisecond)
	}
}

func (t *tally) produce(queue workQueue, items int, over time.Duration) {
	pace := time.NewTicker(max(over/time.Duration(max(items, 1)), time.Millisecond))
	defer pace.Stop()
	for number := range items {
		item := fmt.Sprintf("item-%d-%04d", started.UnixNano(), number)
		begun := elapsed()
		err := queue.enqueue(number, item)
		t.mutex.Lock()
		if err == nil {
			t.enqueued = append(t.enqueued, item)
		} else {
			t.ambiguous = append(t.ambiguous, item)
		}
		t.mutex.Unlock()
		if err != nil {
			emitError("enqueue", begun, err, fields{"item": item})
		}
		<-pace.C
	}
}

// Drain waits until all that was enqueued came out, then one second more for doubles.
func (t *tally) drain(grace time.Duration) {
	for limit := time.Now().Add(grace); len(t.missing()) > 0 && time.Now().Before(limit); {
		time.Sleep(50 * time.Millisecond)
	}
	time.Sleep(time.Second)
}

func (t *tally) missing() []string {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	missing := []string{}
	for _, item := range t.enqueued {
		if t.delivered[item] == 0 {
			missing = append(missing, item)
		}
	}
	return missing
}

func (t *tally) report() {
	missing := t.missing()
	t.mutex.Lock()
	defer t.mutex.Unlock()
	doubled, foreign := []string{}, []string{}
	for item, times := range t.delivered {
		if times > 1 {
			doubled = append(doubled, item)
		}
		if !slices.Contains(t.enqueued, item) && !slices.Contains(t.ambiguous, item) {
			foreign = append(foreign, item)
		}
	}
	emit("summary", fields{
		"enqueued": len(t.enqueued), "ambiguous": len(t.ambiguous), "delivered": len(t.delivered),
		"missing": missing, "doubled": doubled, "foreign": foreign, "dequeue_errors": t.failures,
	})
}
