package main

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	epb "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	lockpb "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/protoadapt"
)

// method is an RPC: its request, and what etcd touches for one.
type method struct {
	request func() protoadapt.MessageV1
	visit   func(protoadapt.MessageV1, *touches)
}

// message is a pointer to a request's type.
type message[T any] interface {
	*T
	protoadapt.MessageV1
}

func rpc[T any, P message[T]](visit func(P, *touches)) method {
	return method{
		request: func() protoadapt.MessageV1 { return P(new(T)) },
		visit:   func(request protoadapt.MessageV1, seen *touches) { visit(request.(P), seen) },
	}
}

// on is an RPC that touches no keys.
func on[T any, P message[T]](action string) method {
	return rpc(func(_ P, t *touches) { t.on(action) })
}

// onAll is an RPC that reveals every key, or a digest of every key.
func onAll[T any, P message[T]](action string) method {
	return rpc(func(_ P, t *touches) {
		t.on(action)
		t.everyKey("read")
	})
}

var methods = map[string]method{
	"/etcdserverpb.KV/Range": rpc(visitRange),
	"/etcdserverpb.KV/Put": rpc(func(r *pb.PutRequest, t *touches) {
		visitPut(throughRaft(r, &pb.PutRequest{}), t)
	}),
	"/etcdserverpb.KV/DeleteRange": rpc(func(r *pb.DeleteRangeRequest, t *touches) {
		visitDelete(throughRaft(r, &pb.DeleteRangeRequest{}), t)
	}),
	"/etcdserverpb.KV/Txn": rpc(func(r *pb.TxnRequest, t *touches) {
		if !isReadOnly(r) {
			r = throughRaft(r, &pb.TxnRequest{})
		}
		visitTxn(r, t)
	}),
	"/etcdserverpb.KV/Compact":  on[pb.CompactionRequest]("compact"),
	"/etcdserverpb.Watch/Watch": rpc(visitWatch),

	"/etcdserverpb.Lease/LeaseGrant": on[pb.LeaseGrantRequest]("lease"),
	"/etcdserverpb.Lease/LeaseRevoke": rpc(func(r *pb.LeaseRevokeRequest, t *touches) {
		t.on("lease")
		t.onLease("write", r.ID)
	}),
	"/etcdserverpb.Lease/LeaseKeepAlive": rpc(func(r *pb.LeaseKeepAliveRequest, t *touches) {
		t.on("lease")
		t.onLease("write", r.ID)
	}),
	"/etcdserverpb.Lease/LeaseTimeToLive": rpc(func(r *pb.LeaseTimeToLiveRequest, t *touches) {
		t.on("lease")
		if r.Keys {
			t.onLease("read", r.ID)
		}
	}),
	"/etcdserverpb.Lease/LeaseLeases": onAll[pb.LeaseLeasesRequest]("lease"),

	"/v3lockpb.Lock/Lock":                 rpc(queued((*queueServers).lock)),
	"/v3lockpb.Lock/Unlock":               rpc(queued((*queueServers).unlock)),
	"/v3electionpb.Election/Campaign":     rpc(queued((*queueServers).campaign)),
	"/v3electionpb.Election/Proclaim":     rpc(queued((*queueServers).proclaim)),
	"/v3electionpb.Election/Leader":       rpc(queued((*queueServers).leader)),
	"/v3electionpb.Election/Observe":      rpc(queued((*queueServers).observe)),
	"/v3electionpb.Election/Resign":       rpc(queued((*queueServers).resign)),
	"/etcdserverpb.Cluster/MemberList":    on[pb.MemberListRequest]("cluster_view"),
	"/etcdserverpb.Cluster/MemberAdd":     on[pb.MemberAddRequest]("cluster"),
	"/etcdserverpb.Cluster/MemberRemove":  on[pb.MemberRemoveRequest]("cluster"),
	"/etcdserverpb.Cluster/MemberUpdate":  on[pb.MemberUpdateRequest]("cluster"),
	"/etcdserverpb.Cluster/MemberPromote": on[pb.MemberPromoteRequest]("cluster"),

	"/etcdserverpb.Maintenance/Status":     on[pb.StatusRequest]("maintenance_view"),
	"/etcdserverpb.Maintenance/Defragment": on[pb.DefragmentRequest]("maintenance"),
	"/etcdserverpb.Maintenance/Hash":       onAll[pb.HashRequest]("maintenance"),
	"/etcdserverpb.Maintenance/HashKV":     onAll[pb.HashKVRequest]("maintenance"),
	"/etcdserverpb.Maintenance/Snapshot":   onAll[pb.SnapshotRequest]("maintenance"),
	"/etcdserverpb.Maintenance/MoveLeader": on[pb.MoveLeaderRequest]("maintenance"),
	"/etcdserverpb.Maintenance/Alarm": rpc(func(r *pb.AlarmRequest, t *touches) {
		t.on(viewing(r.Action == pb.AlarmRequest_GET))
	}),
	"/etcdserverpb.Maintenance/Downgrade": rpc(func(r *pb.DowngradeRequest, t *touches) {
		t.on(viewing(r.Action == pb.DowngradeRequest_VALIDATE))
	}),

	"/etcdserverpb.Auth/Authenticate":         on[pb.AuthenticateRequest]("auth"),
	"/etcdserverpb.Auth/AuthStatus":           on[pb.AuthStatusRequest]("auth_view"),
	"/etcdserverpb.Auth/AuthEnable":           on[pb.AuthEnableRequest]("auth"),
	"/etcdserverpb.Auth/AuthDisable":          on[pb.AuthDisableRequest]("auth"),
	"/etcdserverpb.Auth/UserAdd":              on[pb.AuthUserAddRequest]("auth"),
	"/etcdserverpb.Auth/UserGet":              on[pb.AuthUserGetRequest]("auth_view"),
	"/etcdserverpb.Auth/UserList":             on[pb.AuthUserListRequest]("auth_view"),
	"/etcdserverpb.Auth/UserDelete":           on[pb.AuthUserDeleteRequest]("auth"),
	"/etcdserverpb.Auth/UserChangePassword":   on[pb.AuthUserChangePasswordRequest]("auth"),
	"/etcdserverpb.Auth/UserGrantRole":        on[pb.AuthUserGrantRoleRequest]("auth"),
	"/etcdserverpb.Auth/UserRevokeRole":       on[pb.AuthUserRevokeRoleRequest]("auth"),
	"/etcdserverpb.Auth/RoleAdd":              on[pb.AuthRoleAddRequest]("auth"),
	"/etcdserverpb.Auth/RoleGet":              on[pb.AuthRoleGetRequest]("auth_view"),
	"/etcdserverpb.Auth/RoleList":             on[pb.AuthRoleListRequest]("auth_view"),
	"/etcdserverpb.Auth/RoleDelete":           on[pb.AuthRoleDeleteRequest]("auth"),
	"/etcdserverpb.Auth/RoleGrantPermission":  on[pb.AuthRoleGrantPermissionRequest]("auth"),
	"/etcdserverpb.Auth/RoleRevokePermission": on[pb.AuthRoleRevokePermissionRequest]("auth"),
}

// Every RPC of this version has a row; RangeStream has one where the version has the RPC.
func init() {
	server := grpc.NewServer()
	pb.RegisterKVServer(server, nil)
	pb.RegisterWatchServer(server, nil)
	pb.RegisterLeaseServer(server, nil)
	pb.RegisterClusterServer(server, nil)
	pb.RegisterMaintenanceServer(server, nil)
	pb.RegisterAuthServer(server, nil)
	lockpb.RegisterLockServer(server, nil)
	epb.RegisterElectionServer(server, nil)
	for service, info := range server.GetServiceInfo() {
		for _, described := range info.Methods {
			path := "/" + service + "/" + described.Name
			if path == "/etcdserverpb.KV/RangeStream" {
				methods[path] = rpc(visitRange)
			}
			if _, known := methods[path]; !known {
				panic("no row for " + path)
			}
		}
	}
}

func viewing(is bool) string {
	if is {
		return "maintenance_view"
	}
	return "maintenance"
}
