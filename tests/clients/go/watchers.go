// The watches of a spec file, each opened again where an ordinary application would: everything that the application saw, and
// no verdict. The contract of these lines is the same for every client family; tests/etcd/chaos judges them.
package main

import (
	"context"
	"encoding/json"
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

const watchAgainAfter = 200 * time.Millisecond

// WatchSpec is one watch of the spec file.
type watchSpec struct {
	Name           string   `json:"name"`
	Key            string   `json:"key"`
	RangeEnd       string   `json:"range_end"`
	StartRevision  int64    `json:"start_revision"`
	PrevKV         bool     `json:"prev_kv"`
	ProgressNotify bool     `json:"progress_notify"`
	Fragment       bool     `json:"fragment"`
	Filters        []string `json:"filters"`
}

type watchersRun struct {
	*options
	spec          string
	requireLeader bool
}

func watchersScenario(flags *flag.FlagSet, o *options) func() error {
	w := &watchersRun{options: o}
	flags.StringVar(&w.spec, "spec", "", "JSON file that names the watches")
	flags.BoolVar(&w.requireLeader, "require-leader", false, "open the watches WithRequireLeader")
	return w.run
}

func (w *watchersRun) run() error {
	text, err := os.ReadFile(w.spec)
	if err != nil {
		return err
	}
	var spec struct {
		Watches []watchSpec `json:"watches"`
	}
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	if len(spec.Watches) == 0 {
		return errors.New("the spec names no watch")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if w.requireLeader {
		ctx = clientv3.WithRequireLeader(ctx)
	}
	client, err := w.dial()
	if err != nil {
		return err
	}
	var standing, open sync.WaitGroup
	standing.Add(len(spec.Watches))
	for _, watch := range spec.Watches {
		options, err := watch.options()
		if err != nil {
			return err
		}
		open.Go(func() { watch.run(ctx, client, options, standing.Done) })
	}
	all := make(chan struct{})
	go func() { standing.Wait(); close(all) }()
	select {
	case <-all:
		emit("ready", fields{})
	case <-ctx.Done():
	}
	open.Wait()
	return client.Close()
}

// Options are those of the spec but the start.
func (s watchSpec) options() ([]clientv3.OpOption, error) {
	options := []clientv3.OpOption{clientv3.WithCreatedNotify()}
	switch s.RangeEnd {
	case "":
	case "\x00":
		options = append(options, clientv3.WithFromKey())
	default:
		options = append(options, clientv3.WithRange(s.RangeEnd))
	}
	if s.PrevKV {
		options = append(options, clientv3.WithPrevKV())
	}
	if s.ProgressNotify {
		options = append(options, clientv3.WithProgressNotify())
	}
	if s.Fragment {
		options = append(options, clientv3.WithFragment())
	}
	for _, filter := range s.Filters {
		switch filter {
		case "noput":
			options = append(options, clientv3.WithFilterPut())
		case "nodelete":
			options = append(options, clientv3.WithFilterDelete())
		default:
			return nil, fmt.Errorf("watch %s: unknown filter %q", s.Name, filter)
		}
	}
	return options, nil
}

// Run keeps the watch open: after a compaction from its revision on, after any other end behind the last event seen, or from
// where it was opened.
func (s watchSpec) run(ctx context.Context, client *clientv3.Client, options []clientv3.OpOption, stands func()) {
	var once sync.Once
	start := s.StartRevision
	for ctx.Err() == nil {
		inner, cancel := context.WithCancel(ctx)
		var compacted int64
		told := false
		for response := range client.Watch(inner, s.Key, append(options, clientv3.WithRev(start))...) {
			switch err := response.Err(); {
			case ctx.Err() != nil:
			case response.CompactRevision != 0:
				compacted = response.CompactRevision
				emit("compacted", fields{"watch": s.Name, "compact_revision": compacted})
			case err != nil:
				told = true
				s.ended(err)
			case response.Created:
				emit("created", fields{"watch": s.Name, "revision": response.Header.Revision})
				once.Do(stands)
			case response.IsProgressNotify():
				emit("progress", fields{"watch": s.Name, "revision": response.Header.Revision})
			case len(response.Events) > 0:
				start = response.Events[len(response.Events)-1].Kv.ModRevision + 1
				s.events(response)
			}
		}
		cancel()
		if ctx.Err() != nil {
			return
		}
		if compacted != 0 {
			start = compacted
			continue
		}
		if !told {
			// Also what clientv3 does when etcd ends a watch that stood, with a reason that it keeps to itself.
			emit("ended", fields{"watch": s.Name, "code": "", "message": ""})
		}
		time.Sleep(watchAgainAfter)
	}
}

func (s watchSpec) ended(err error) {
	code, message := describe(err)
	emit("ended", fields{"watch": s.Name, "code": code, "message": message})
}

func (s watchSpec) events(response clientv3.WatchResponse) {
	rows := make([][]any, len(response.Events))
	for i, event := range response.Events {
		kv, kind := event.Kv, "put"
		if event.Type == clientv3.EventTypeDelete {
			kind = "delete"
		}
		var previous any
		if p := event.PrevKv; p != nil {
			previous = []any{string(p.Value), p.ModRevision, p.CreateRevision, p.Version}
		}
		rows[i] = []any{
			kind, string(kv.Key), string(kv.Value), kv.ModRevision, kv.CreateRevision, kv.Version, kv.Lease, previous,
		}
	}
	emit("response", fields{"watch": s.Name, "revision": response.Header.Revision, "events": rows})
}
