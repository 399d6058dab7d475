// Kwclient drives the real etcd clientv3 through one scenario and prints what an application saw, one JSON object a line.
//
// It owns the scenarios and the record; it must not know Keyward, and it does not judge: tests/etcd does. The same source is
// built on several clientv3 versions (mods/), so it uses only what all of them have.
//
// Exit codes: 0 the scenario ran to its end, whatever it showed; 1 it could not be set up; 2 clientv3 panicked (as Go does);
// 64 bad usage.
package main

import (
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

const exitSetUp, exitUsage = 1, 64

// A scenario adds its flags to the common ones and returns what to run once they are parsed.
var scenarios = map[string]func(*flag.FlagSet, *options) func() error{
	"queue":          queueScenario,
	"priority-queue": priorityQueueScenario,
	"barrier":        barrierScenario,
	"mutex":          mutexScenario,
	"election":       electionScenario,
	"watch-storm":    watchStormScenario,
	"login-storm":    loginStormScenario,
	"load":           loadScenario,
	"sync":           syncScenario,
	"watchers":       watchersScenario,
	"rounds":         roundsScenario,
	"tenant":         tenantScenario,
	"namespaced":     namespacedScenario,
}

func main() {
	if len(os.Args) < 2 || scenarios[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: kwclient queue|priority-queue|barrier|mutex|election|watch-storm|login-storm|load|sync|watchers|rounds|tenant|namespaced [flags] (-h lists them)")
		os.Exit(exitUsage)
	}
	name := os.Args[1]
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	o := &options{}
	o.bind(flags, "/a/"+name+"/")
	run := scenarios[name](flags, o)
	if err := flags.Parse(os.Args[2:]); err != nil || flags.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "kwclient: bad flags or stray arguments:", flags.Args())
		os.Exit(exitUsage)
	}
	emit("start", fields{
		"scenario": name, "client": "clientv3 " + strings.TrimPrefix(clientVersion(), "v"), "clientv3": clientVersion(),
		"unix_ms": started.UnixMilli(),
	})
	if err := run(); err != nil {
		code, message := describe(err)
		emit("fatal", fields{"code": code, "message": message})
		os.Exit(exitSetUp)
	}
	seen.report()
	emit("end", fields{})
}

// ClientVersion is the version of clientv3 that this binary was linked with.
func clientVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, module := range info.Deps {
		// The second is for clientv3 before 3.5.
		if module.Path == "go.etcd.io/etcd/client/v3" || module.Path == "go.etcd.io/etcd" {
			return strings.TrimSuffix(module.Version, "+incompatible")
		}
	}
	return ""
}
