// Tenant: one client that reads and writes all the time, holds a watch and a lease, and opens the watch again where it was
// compacted. It tells which cluster answers, whenever that is another, and what fails, each failure once. The contract of the
// lines is in ../README.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	tenantTurn  = 20 * time.Millisecond
	tenantLimit = 2 * time.Second
	tenantTTL   = 600
)

type tenantRun struct {
	*options
	client *clientv3.Client
}

func tenantScenario(_ *flag.FlagSet, o *options) func() error {
	t := &tenantRun{options: o}
	return t.run
}

func (t *tenantRun) run() (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if t.client, err = t.dial(); err != nil {
		return err
	}
	granted, err := t.client.Grant(ctx, tenantTTL)
	if err != nil {
		return err
	}
	created := make(chan struct{})
	go t.watch(ctx, created)
	if !answered(created, opLimit) {
		return fmt.Errorf("the watch was not created")
	}
	emit("ready", fields{})
	writes, reads := &tenantOp{name: "write"}, &tenantOp{name: "read"}
	for number := 1; ctx.Err() == nil; number++ {
		writes.do(ctx, func(ctx context.Context) (*pb.ResponseHeader, error) {
			put, err := t.client.Put(ctx, t.prefix+"watched", fmt.Sprint(number))
			if err != nil {
				return nil, err
			}
			return put.Header, nil
		})
		reads.do(ctx, func(ctx context.Context) (*pb.ResponseHeader, error) {
			got, err := t.client.Get(ctx, t.prefix+"watched")
			if err != nil {
				return nil, err
			}
			return got.Header, nil
		})
		select {
		case <-ctx.Done():
		case <-time.After(tenantTurn):
		}
	}
	last, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	renewed, err := t.client.KeepAliveOnce(last, granted.ID)
	code, message := describe(err)
	ttl := int64(0)
	if renewed != nil {
		ttl = renewed.TTL
	}
	emit("lease", fields{"ttl": ttl, "code": code, "message": message})
	emit("summary", fields{"writes": writes.good, "reads": reads.good, "writes_failed": writes.bad, "reads_failed": reads.bad})
	return t.client.Close()
}

type tenantOp struct {
	name      string
	good, bad int
	cluster   uint64
	failing   string
}

func (o *tenantOp) do(ctx context.Context, call func(context.Context) (*pb.ResponseHeader, error)) {
	limited, cancel := context.WithTimeout(ctx, tenantLimit)
	defer cancel()
	header, err := call(limited)
	now := time.Now().UnixMilli()
	switch {
	case err != nil && ctx.Err() != nil:
	case err != nil:
		o.bad++
		code, message := describe(err)
		if code+message != o.failing {
			emit("failing", fields{"op": o.name, "code": code, "message": message, "unix_ms": now})
		}
		o.failing = code + message
	default:
		o.good++
		if o.cluster != header.ClusterId || o.failing != "" {
			emit("served", fields{"op": o.name, "cluster": fmt.Sprintf("%x", header.ClusterId), "unix_ms": now})
		}
		o.cluster, o.failing = header.ClusterId, ""
	}
}

func (t *tenantRun) watch(ctx context.Context, created chan struct{}) {
	start, stands, cluster := int64(0), false, uint64(0)
	for ctx.Err() == nil {
		inner, cancel := context.WithCancel(ctx)
		compacted := int64(0)
		for response := range t.client.Watch(inner, t.prefix+"watched", clientv3.WithRev(start), clientv3.WithCreatedNotify()) {
			now := time.Now().UnixMilli()
			switch err := response.Err(); {
			case ctx.Err() != nil:
			case response.CompactRevision != 0:
				compacted = response.CompactRevision
				code, message := describe(err)
				emit("compacted", fields{
					"compact_revision": compacted, "code": code, "message": message, "canceled": response.Canceled, "unix_ms": now,
				})
			case err != nil:
				code, message := describe(err)
				emit("ended", fields{"code": code, "message": message, "unix_ms": now})
			case response.Created:
				if !stands {
					stands = true
					close(created)
				}
			case len(response.Events) > 0:
				start = response.Events[len(response.Events)-1].Kv.ModRevision + 1
				if cluster != response.Header.ClusterId {
					cluster = response.Header.ClusterId
					emit("served", fields{"op": "watch", "cluster": fmt.Sprintf("%x", cluster), "unix_ms": now})
				}
			}
		}
		cancel()
		if compacted != 0 {
			start = compacted
			continue
		}
		if ctx.Err() == nil {
			emit("reopened", fields{"start": start})
			time.Sleep(watchAgainAfter)
		}
	}
}
