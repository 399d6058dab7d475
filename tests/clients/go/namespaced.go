// Namespaced: two clients do the same random things, each in a keyspace of its own: one through a server that gives its user a
// namespace, one at a member, by clientv3's own `namespace` package. Every answer and event must be the same but for revisions, which
// are compared by the step that made them; and a third reader, of clientv3's package again, must find in the first keyspace exactly
// what the first client is shown. The contract of the lines is in README.md.
package main

import (
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"math/rand"
	"sort"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
)

const (
	namespacedTTL   = 600
	namespacedDepth = 3
	lastOfAll       = "~last"
	lastOfB         = "b~last"
)

type namespacedRun struct {
	*options
	beside, own, reference string
	seed                   int64
	steps                  int

	random                *rand.Rand
	ops, events, mismatch int
}

// A keyspace is one of the two, with the step that made each of its revisions.
type keyspace struct {
	name  string
	kv    clientv3.KV
	lease clientv3.Lease
	watch clientv3.Watcher
	made  map[int64]int
	first int64
	id    clientv3.LeaseID
	seen  map[string]chan clientv3.WatchResponse
}

func namespacedScenario(flags *flag.FlagSet, o *options) func() error {
	n := &namespacedRun{options: o}
	flags.StringVar(&n.beside, "beside", "", "host:port of a member, for clientv3's own namespaces")
	flags.StringVar(&n.own, "own", "", "prefix, in hex, that the server gives the user")
	flags.StringVar(&n.reference, "reference", "", "prefix, in hex, of the keyspace beside")
	flags.Int64Var(&n.seed, "seed", 1, "of the random things")
	flags.IntVar(&n.steps, "steps", 300, "random things to do")
	return n.run
}

func (n *namespacedRun) run() error {
	n.random = rand.New(rand.NewSource(n.seed))
	own, err := hex.DecodeString(n.own)
	if err != nil {
		return err
	}
	reference, err := hex.DecodeString(n.reference)
	if err != nil {
		return err
	}
	through, err := n.dial()
	if err != nil {
		return err
	}
	direct, err := n.dialTo(n.beside)
	if err != nil {
		return err
	}
	ours := &keyspace{name: "through", kv: through, lease: through, watch: through}
	theirs := &keyspace{
		name:  "beside",
		kv:    namespace.NewKV(direct.KV, string(reference)),
		lease: namespace.NewLease(direct.Lease, string(reference)),
		watch: namespace.NewWatcher(direct.Watcher, string(reference)),
	}
	reader := namespace.NewKV(direct.KV, string(own))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for _, side := range []*keyspace{ours, theirs} {
		if err := side.open(ctx); err != nil {
			return err
		}
	}
	emit("ready", fields{})
	for step := 1; step <= n.steps; step++ {
		op := n.thing(0)
		n.compare(fmt.Sprint(step, " ", op.text), ours.do(ctx, step, op), theirs.do(ctx, step, op))
		if step%10 == 0 {
			n.compareReads(ctx, step, ours, reader)
			n.compare(fmt.Sprint(step, " lease"), ours.attached(ctx), theirs.attached(ctx))
		}
	}
	last := thing{text: "last", op: func(*keyspace) clientv3.Op {
		return clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpPut(lastOfB, "v"), clientv3.OpPut(lastOfAll, "v")}, nil)
	}}
	n.compare("last", ours.do(ctx, n.steps+1, last), theirs.do(ctx, n.steps+1, last))
	for name := range ours.seen {
		mine, beside := ours.events(ctx, name), theirs.events(ctx, name)
		n.events += len(mine)
		n.compare("events of "+name, strings.Join(mine, "\n"), strings.Join(beside, "\n"))
	}
	for _, side := range []*keyspace{ours, theirs} {
		if _, err := side.lease.Revoke(ctx, side.id); err != nil {
			return err
		}
	}
	gone := thing{text: "after the revoke", op: func(*keyspace) clientv3.Op {
		return clientv3.OpGet("\x00", clientv3.WithFromKey(), clientv3.WithKeysOnly())
	}}
	n.compare(gone.text, ours.do(ctx, n.steps+2, gone), theirs.do(ctx, n.steps+2, gone))
	emit("summary", fields{"ops": n.ops, "events": n.events, "mismatches": n.mismatch})
	return nil
}

func (n *namespacedRun) compare(what, ours, theirs string) {
	n.ops++
	if ours != theirs {
		n.mismatch++
		emit("mismatch", fields{"what": what, "through": ours, "beside": theirs})
	}
}

// CompareReads reads the first keyspace from inside and from outside, at one revision: the same answer, revisions included.
func (n *namespacedRun) compareReads(ctx context.Context, step int, ours *keyspace, reader clientv3.KV) {
	now, err := ours.kv.Get(ctx, "a")
	if err != nil {
		n.compare(fmt.Sprint(step, " read"), err.Error(), "")
		return
	}
	for _, op := range []clientv3.Op{
		clientv3.OpGet("", clientv3.WithPrefix(), clientv3.WithRev(now.Header.Revision)),
		clientv3.OpGet("a", clientv3.WithFromKey(), clientv3.WithLimit(3), clientv3.WithRev(now.Header.Revision)),
	} {
		inside, one := ours.kv.Do(ctx, op)
		outside, other := reader.Do(ctx, op)
		raw := func(response clientv3.OpResponse, err error) string {
			if err != nil {
				code, message := describe(err)
				return code + " " + message
			}
			got := response.Get()
			return fmt.Sprint(got.Kvs, got.More, got.Count)
		}
		n.compare(fmt.Sprint(step, " read"), raw(inside, one), raw(outside, other))
	}
}

// A thing to do, for any keyspace.
type thing struct {
	text string
	op   func(*keyspace) clientv3.Op
}

var namespacedBytes = []byte{0, 1, 'a', 'b', '/', 0xfe, 0xff}

func (n *namespacedRun) key() string {
	// Rarely empty, which etcd refuses.
	length := 1 + n.random.Intn(3)
	if n.random.Intn(40) == 0 {
		length = 0
	}
	key := make([]byte, length)
	for i := range key {
		key[i] = namespacedBytes[n.random.Intn(len(namespacedBytes))]
	}
	return string(key)
}

// In a Txn clientv3's package prefixes an empty key, and so uses the prefix itself as a key; etcd refuses an empty key.
func (n *namespacedRun) keyAt(depth int) string {
	for {
		if key := n.key(); key != "" || depth == 0 {
			return key
		}
	}
}

func (n *namespacedRun) interval(key string) (string, []clientv3.OpOption) {
	switch n.random.Intn(5) {
	case 0:
		return "prefix", []clientv3.OpOption{clientv3.WithPrefix()}
	case 1:
		return "from", []clientv3.OpOption{clientv3.WithFromKey()}
	case 2:
		if end := n.keyAt(1); key != "" {
			return fmt.Sprintf("to %q", end), []clientv3.OpOption{clientv3.WithRange(end)}
		}
	}
	return "one", nil
}

func (n *namespacedRun) thing(depth int) thing {
	key := n.keyAt(depth)
	kind := n.random.Intn(10)
	switch {
	case kind < 3:
		value, leased, prev := fmt.Sprint(n.random.Intn(100)), n.random.Intn(3) == 0, n.random.Intn(2) == 0
		return thing{fmt.Sprintf("put %q %s lease %v prev %v", key, value, leased, prev), func(side *keyspace) clientv3.Op {
			options := []clientv3.OpOption{}
			if leased {
				options = append(options, clientv3.WithLease(side.id))
			}
			if prev {
				options = append(options, clientv3.WithPrevKV())
			}
			return clientv3.OpPut(key, value, options...)
		}}
	case kind < 6:
		text, options := n.interval(key)
		if n.random.Intn(3) == 0 {
			options = append(options, clientv3.WithLimit(int64(1+n.random.Intn(3))))
		}
		if n.random.Intn(3) == 0 {
			options = append(options, clientv3.WithSort(clientv3.SortByKey, clientv3.SortDescend))
		}
		if n.random.Intn(4) == 0 {
			options = append(options, clientv3.WithCountOnly())
		}
		return thing{fmt.Sprintf("get %q %s", key, text), func(*keyspace) clientv3.Op { return clientv3.OpGet(key, options...) }}
	case kind < 7:
		text, options := n.interval(key)
		options = append(options, clientv3.WithPrevKV())
		return thing{fmt.Sprintf("delete %q %s", key, text), func(*keyspace) clientv3.Op { return clientv3.OpDelete(key, options...) }}
	case depth >= namespacedDepth:
		return thing{fmt.Sprintf("get %q", key), func(*keyspace) clientv3.Op { return clientv3.OpGet(key) }}
	default:
		return n.txn(depth)
	}
}

func (n *namespacedRun) txn(depth int) thing {
	compares, texts := []clientv3.Cmp{}, []string{}
	for i := n.random.Intn(3); i > 0; i-- {
		key := n.keyAt(1)
		compare := clientv3.Compare(clientv3.Version(key), "=", n.random.Intn(3))
		switch n.random.Intn(3) {
		case 0:
			compare = clientv3.Compare(clientv3.CreateRevision(key), ">", 0)
		case 1:
			compare = clientv3.Compare(clientv3.Version(key), ">", 0).WithPrefix()
		}
		compares, texts = append(compares, compare), append(texts, fmt.Sprintf("%q", key))
	}
	branch := func() ([]thing, string) {
		things, inner := []thing{}, []string{}
		for i := n.random.Intn(3); i > 0; i-- {
			one := n.thing(depth + 1)
			things, inner = append(things, one), append(inner, one.text)
		}
		return things, strings.Join(inner, ", ")
	}
	success, then := branch()
	failure, otherwise := branch()
	ops := func(side *keyspace, things []thing) []clientv3.Op {
		made := []clientv3.Op{}
		for _, one := range things {
			made = append(made, one.op(side))
		}
		return made
	}
	return thing{fmt.Sprintf("txn if %v then {%s} else {%s}", texts, then, otherwise), func(side *keyspace) clientv3.Op {
		return clientv3.OpTxn(compares, ops(side, success), ops(side, failure))
	}}
}

func (side *keyspace) open(ctx context.Context) error {
	granted, err := side.lease.Grant(ctx, namespacedTTL)
	if err != nil {
		return err
	}
	side.id, side.made = granted.ID, map[int64]int{}
	first, err := side.kv.Put(ctx, "first", "")
	if err != nil {
		return err
	}
	side.first = first.Header.Revision
	side.made[side.first] = 0
	side.seen = map[string]chan clientv3.WatchResponse{}
	for name, options := range map[string][]clientv3.OpOption{
		"":  {clientv3.WithPrefix()},
		"a": {clientv3.WithFromKey()},
		"b": {clientv3.WithPrefix(), clientv3.WithFilterDelete()},
	} {
		options = append(options, clientv3.WithRev(side.first), clientv3.WithPrevKV())
		watched, kept := side.watch.Watch(ctx, name, options...), make(chan clientv3.WatchResponse, 4096)
		side.seen[name] = kept
		go func() {
			defer close(kept)
			for response := range watched {
				kept <- response
			}
		}()
	}
	return nil
}

func (side *keyspace) do(ctx context.Context, step int, one thing) string {
	response, err := side.kv.Do(ctx, one.op(side))
	if err != nil {
		code, message := describe(err)
		return code + " " + message
	}
	return side.answer(step, response)
}

// Answer is an answer as text, each revision as the step that made it.
func (side *keyspace) answer(step int, response clientv3.OpResponse) string {
	switch {
	case response.Put() != nil:
		side.made[response.Put().Header.Revision] = step
		return fmt.Sprint("put ", side.text(response.Put().PrevKv))
	case response.Get() != nil:
		return side.got((*pb.RangeResponse)(response.Get()))
	case response.Del() != nil:
		if response.Del().Deleted > 0 {
			side.made[response.Del().Header.Revision] = step
		}
		return side.deleted((*pb.DeleteRangeResponse)(response.Del()))
	}
	txn := (*pb.TxnResponse)(response.Txn())
	if wrote(txn) {
		side.made[txn.Header.Revision] = step
	}
	return side.txn(txn)
}

func (side *keyspace) got(got *pb.RangeResponse) string {
	return fmt.Sprint("got ", side.texts(got.Kvs), got.More, got.Count)
}

func (side *keyspace) deleted(deleted *pb.DeleteRangeResponse) string {
	return fmt.Sprint("deleted ", deleted.Deleted, side.texts(deleted.PrevKvs))
}

func wrote(txn *pb.TxnResponse) bool {
	for _, op := range txn.Responses {
		deleted := op.GetResponseDeleteRange()
		if op.GetResponsePut() != nil || deleted != nil && deleted.Deleted > 0 {
			return true
		}
		if nested := op.GetResponseTxn(); nested != nil && wrote(nested) {
			return true
		}
	}
	return false
}

func (side *keyspace) txn(txn *pb.TxnResponse) string {
	all := []string{fmt.Sprint("txn ", txn.Succeeded)}
	for _, op := range txn.Responses {
		switch {
		case op.GetResponsePut() != nil:
			all = append(all, "put "+side.text(op.GetResponsePut().PrevKv))
		case op.GetResponseRange() != nil:
			all = append(all, side.got(op.GetResponseRange()))
		case op.GetResponseDeleteRange() != nil:
			all = append(all, side.deleted(op.GetResponseDeleteRange()))
		case op.GetResponseTxn() != nil:
			all = append(all, "{"+side.txn(op.GetResponseTxn())+"}")
		}
	}
	return strings.Join(all, "; ")
}

func (side *keyspace) texts(kvs []*mvccpb.KeyValue) string {
	all := []string{}
	for _, kv := range kvs {
		all = append(all, side.text(kv))
	}
	return "[" + strings.Join(all, " ") + "]"
}

func (side *keyspace) text(kv *mvccpb.KeyValue) string {
	if kv == nil {
		return "none"
	}
	return fmt.Sprintf("%q=%q/%s/%s/%d/%v", kv.Key, kv.Value, side.step(kv.CreateRevision), side.step(kv.ModRevision),
		kv.Version, kv.Lease != 0)
}

func (side *keyspace) step(revision int64) string {
	if revision == 0 {
		return "-"
	}
	if step, known := side.made[revision]; known {
		return fmt.Sprint(step)
	}
	return fmt.Sprint("unknown ", revision)
}

func (side *keyspace) attached(ctx context.Context) string {
	told, err := side.lease.TimeToLive(ctx, side.id, clientv3.WithAttachedKeys())
	if err != nil {
		code, message := describe(err)
		return code + " " + message
	}
	keys := []string{}
	for _, key := range told.Keys {
		keys = append(keys, fmt.Sprintf("%q", key))
	}
	sort.Strings(keys)
	return fmt.Sprint(told.GrantedTTL, keys)
}

// Events are those of a watch up to the last key, or up to the time limit.
func (side *keyspace) events(ctx context.Context, name string) []string {
	all := []string{}
	limit := time.After(opLimit)
	for {
		select {
		case response, open := <-side.seen[name]:
			if !open {
				return append(all, "closed")
			}
			if err := response.Err(); err != nil {
				return append(all, err.Error())
			}
			for _, event := range response.Events {
				all = append(all, fmt.Sprint(event.Type, side.text(event.Kv), side.text(event.PrevKv)))
				if key := string(event.Kv.Key); key == lastOfAll || name == "b" && key == lastOfB {
					return all
				}
			}
		case <-limit:
			return all
		case <-ctx.Done():
			return append(all, ctx.Err().Error())
		}
	}
}
