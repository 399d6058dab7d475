package main

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election"
	epb "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock"
	lockpb "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc"
)

// queueServers are etcd's own Lock and Election servers. etcd gives them a client of itself (server/etcdserver/api/v3client); here the
// client's store is a recordedStore.
type queueServers struct {
	ctx      context.Context
	lockrs   lockpb.LockServer
	election epb.ElectionServer
}

// queued runs a request on the servers, each time with a store that answers otherwise, and takes what they ask the store for.
func queued[P any](call func(*queueServers, P)) func(P, *touches) {
	return func(request P, t *touches) {
		_, namesNoLease := any(request).(*epb.LeaderRequest)
		for _, behaviour := range []recordedStore{
			{succeeds: true},
			{succeeds: true, isContended: true},
			{succeeds: false, isContended: true},
		} {
			ctx, cancel := context.WithCancel(context.Background())
			store := behaviour
			store.seen = t
			client := clientv3.NewCtxClient(ctx)
			client.KV = clientv3.NewKVFromKVClient(&store, client)
			client.Lease = &recordedLeases{seen: t, namesNoLease: namesNoLease}
			client.Watcher = recordedWatcher{seen: t}
			call(&queueServers{ctx, v3lock.NewLockServer(client), v3election.NewElectionServer(client)}, request)
			cancel()
		}
	}
}

// An answer or error of the servers says nothing: what they asked for before is recorded.
func (s *queueServers) lock(r *lockpb.LockRequest)      { _, _ = s.lockrs.Lock(s.ctx, r) }
func (s *queueServers) unlock(r *lockpb.UnlockRequest)  { _, _ = s.lockrs.Unlock(s.ctx, r) }
func (s *queueServers) campaign(r *epb.CampaignRequest) { _, _ = s.election.Campaign(s.ctx, r) }
func (s *queueServers) proclaim(r *epb.ProclaimRequest) { _, _ = s.election.Proclaim(s.ctx, r) }
func (s *queueServers) leader(r *epb.LeaderRequest)     { _, _ = s.election.Leader(s.ctx, r) }
func (s *queueServers) resign(r *epb.ResignRequest)     { _, _ = s.election.Resign(s.ctx, r) }
func (s *queueServers) observe(r *epb.LeaderRequest) {
	_ = s.election.Observe(r, observeStream{ctx: s.ctx})
}

type observeStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s observeStream) Context() context.Context     { return s.ctx }
func (observeStream) Send(*epb.LeaderResponse) error { return nil }

// The revisions of a store in which somebody else came first.
const (
	firstRevision = 1
	ownRevision   = 5
)

// recordedStore is a store that notes the keys of each request. Where it is contended, somebody else's key is in every queue.
type recordedStore struct {
	pb.KVClient
	seen        *touches
	succeeds    bool
	isContended bool
}

func (s *recordedStore) kv(r *pb.RangeRequest) *mvccpb.KeyValue {
	if len(r.RangeEnd) == 0 {
		return &mvccpb.KeyValue{Key: r.Key, Value: []byte("another"), CreateRevision: ownRevision}
	}
	return &mvccpb.KeyValue{Key: append(r.Key[:len(r.Key):len(r.Key)], '0'), CreateRevision: firstRevision}
}

func (s *recordedStore) ranged(r *pb.RangeRequest) *pb.RangeResponse {
	response := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: ownRevision}}
	if s.isContended {
		response.Kvs = []*mvccpb.KeyValue{s.kv(r)}
	}
	return response
}

// etcd refuses an empty key before it reads anything (server/etcdserver/api/v3rpc/key.go).
func (s *recordedStore) Range(_ context.Context, r *pb.RangeRequest, _ ...grpc.CallOption) (*pb.RangeResponse, error) {
	if len(r.Key) == 0 {
		return nil, rpctypes.ErrEmptyKey
	}
	visitRange(r, s.seen)
	return s.ranged(r), nil
}

func (s *recordedStore) DeleteRange(
	_ context.Context, r *pb.DeleteRangeRequest, _ ...grpc.CallOption,
) (*pb.DeleteRangeResponse, error) {
	if len(r.Key) == 0 {
		return nil, rpctypes.ErrEmptyKey
	}
	visitDelete(r, s.seen)
	return &pb.DeleteRangeResponse{Header: &pb.ResponseHeader{Revision: ownRevision}}, nil
}

func (s *recordedStore) Txn(_ context.Context, r *pb.TxnRequest, _ ...grpc.CallOption) (*pb.TxnResponse, error) {
	for _, compare := range r.Compare {
		if len(compare.Key) == 0 {
			return nil, rpctypes.ErrEmptyKey
		}
	}
	for _, op := range r.Success {
		if put := op.GetRequestPut(); put != nil && put.Lease == grantedLease {
			put.Lease = 0
		}
	}
	visitTxn(r, s.seen)
	branch := r.Success
	if !s.succeeds {
		branch = r.Failure
	}
	response := &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: ownRevision}, Succeeded: s.succeeds}
	for _, op := range branch {
		answered := &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{}}}
		if r := op.GetRequestRange(); r != nil {
			answered.Response = &pb.ResponseOp_ResponseRange{ResponseRange: s.ranged(r)}
		}
		response.Responses = append(response.Responses, answered)
	}
	return response, nil
}

// The lease that recordedLeases grant: no key is on it yet.
const grantedLease = 0x6b77

// recordedLeases notes the leases that are kept alive: keeping a lease keeps its keys. For Leader and Observe, which name none, the Election
// server takes lease -1 (v3election.go).
type recordedLeases struct {
	clientv3.Lease
	seen         *touches
	namesNoLease bool
}

func (l *recordedLeases) Grant(context.Context, int64) (*clientv3.LeaseGrantResponse, error) {
	l.seen.on("lease")
	return &clientv3.LeaseGrantResponse{ID: grantedLease}, nil
}

func (l *recordedLeases) KeepAlive(
	_ context.Context, id clientv3.LeaseID,
) (<-chan *clientv3.LeaseKeepAliveResponse, error) {
	if !l.namesNoLease && id != grantedLease {
		l.seen.onLease("write", int64(id))
	}
	ended := make(chan *clientv3.LeaseKeepAliveResponse)
	close(ended)
	return ended, nil
}

// recordedWatcher notes the keys of each watch, and ends the watch: who waited for it cleans up.
type recordedWatcher struct {
	clientv3.Watcher
	seen *touches
}

func (w recordedWatcher) Watch(_ context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	op := clientv3.OpGet(key, opts...)
	visitWatched(op.KeyBytes(), op.RangeBytes(), false, w.seen)
	ended := make(chan clientv3.WatchResponse)
	close(ended)
	return ended
}
