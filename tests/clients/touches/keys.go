package main

import (
	"bytes"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
)

// touches are written as `ACTION =KEY`, `ACTION [KEY,END)`, `ACTION [KEY,)`, `ACTION lease ID` or `ACTION`, with keys in hexadecimal.
// `none ACTION =KEY` is a range without keys, and its first key.
type touches []string

func (t *touches) on(action string) { *t = append(*t, action) }

func (t *touches) onKey(action string, key []byte) {
	*t = append(*t, fmt.Sprintf("%s =%x", action, key))
}

// onRange takes the range as the store does (server/storage/mvcc/index.go, `Revisions`): a nil end is the key alone, an empty end that is
// not nil has no limit, and a range whose end is not above its key has no key.
func (t *touches) onRange(action string, key, end []byte) {
	switch {
	case end == nil:
		t.onKey(action, key)
	case len(end) == 0:
		*t = append(*t, fmt.Sprintf("%s [%x,)", action, key))
	case bytes.Compare(end, key) <= 0:
		t.onKey("none "+action, key)
	default:
		*t = append(*t, fmt.Sprintf("%s [%x,%x)", action, key, end))
	}
}

// onLease takes the keys attached to a lease (checkLeasePuts and checkLeaseTimeToLive in server/etcdserver). No lease has the id 0.
func (t *touches) onLease(action string, lease int64) {
	if lease != 0 {
		*t = append(*t, fmt.Sprintf("%s lease %d", action, lease))
	}
}

// everyKey is every key that a user can have: etcd refuses the empty key, and the range here begins before it.
func (t *touches) everyKey(action string) { t.onRange(action, nil, []byte{}) }

// gteRange is mkGteRange of server/etcdserver/txn: a zero byte is no limit. What else comes is left as it was decoded, nil or empty.
func gteRange(end []byte) []byte {
	if len(end) == 1 && end[0] == 0 {
		return []byte{}
	}
	return end
}

// decode reads a message as etcd's gRPC server does: gogo/protobuf's generated methods where the type has them (3.5), else Go's own.
func decode(body []byte, into protoadapt.MessageV1) error {
	return proto.Unmarshal(body, protoadapt.MessageV2Of(into))
}

// throughRaft is the request that the members apply: it is written into raft's log, and read from there.
func throughRaft[T protoadapt.MessageV1](request, into T) T {
	body, err := proto.Marshal(protoadapt.MessageV2Of(request))
	if err == nil {
		err = decode(body, into)
	}
	if err != nil {
		panic(fmt.Sprintf("a request that was decoded is not encoded and decoded again: %v", err))
	}
	return into
}

func visitRange(r *pb.RangeRequest, t *touches) {
	t.onRange("read", r.Key, gteRange(r.RangeEnd))
}

func visitPut(r *pb.PutRequest, t *touches) {
	t.onKey("write", r.Key)
	t.onLease("write", r.Lease)
	if r.PrevKv {
		t.onKey("read", r.Key)
	}
}

func visitDelete(r *pb.DeleteRangeRequest, t *touches) {
	t.onRange("write", r.Key, gteRange(r.RangeEnd))
	if r.PrevKv {
		t.onRange("read", r.Key, gteRange(r.RangeEnd))
	}
}

// visitTxn walks a Txn as checkTxnPermission does (server/etcdserver/apply/auth.go). Which branch runs is known to the store only.
func visitTxn(r *pb.TxnRequest, t *touches) {
	for _, c := range r.Compare {
		t.onRange("read", c.Key, gteRange(c.RangeEnd))
	}
	for _, op := range append(r.Success[:len(r.Success):len(r.Success)], r.Failure...) {
		switch op := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			visitRange(op.RequestRange, t)
		case *pb.RequestOp_RequestPut:
			visitPut(op.RequestPut, t)
		case *pb.RequestOp_RequestDeleteRange:
			visitDelete(op.RequestDeleteRange, t)
		case *pb.RequestOp_RequestTxn:
			visitTxn(op.RequestTxn, t)
		}
	}
}

// isReadOnly is IsTxnReadonly of server/etcdserver/txn: such a Txn is served from the decoded message, and does not go through raft.
func isReadOnly(r *pb.TxnRequest) bool {
	for _, op := range r.Success {
		if op.GetRequestRange() == nil {
			return false
		}
	}
	for _, op := range r.Failure {
		if op.GetRequestRange() == nil {
			return false
		}
	}
	return true
}

// visitWatch reads a watch request as serverWatchStream.recvLoop does (server/etcdserver/api/v3rpc/watch.go).
func visitWatch(r *pb.WatchRequest, t *touches) {
	if union, is := r.RequestUnion.(*pb.WatchRequest_CreateRequest); is && union.CreateRequest != nil {
		create := union.CreateRequest
		visitWatched(create.Key, create.RangeEnd, create.PrevKv, t)
	}
}

func visitWatched(key, end []byte, prevKv bool, t *touches) {
	if len(key) == 0 {
		key = []byte{0}
	}
	if len(end) == 0 {
		end = nil
	}
	if len(end) == 1 && end[0] == 0 {
		end = []byte{}
	}
	t.onRange("watch", key, end)
	if prevKv {
		t.onRange("read", key, end)
	}
}
