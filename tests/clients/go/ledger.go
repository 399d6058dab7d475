// The ledger: what was written, what each watcher got, and whether the two agree. Pure: no client, no clock, no output.
//
// Invariants that it checks for every watcher: revisions never go back; no event twice; every acknowledged write under the
// watcher's prefix arrives, at its acknowledged revision; a write of unknown outcome arrives everywhere or nowhere, at most
// once; nothing arrives that was not written, or that etcd's own history lacks.
package main

import (
	"maps"
	"slices"
	"strings"
	"sync"
)

// A write puts one value, unique in the run, to one or more keys at one revision (0: never acknowledged).
type write struct {
	keys     []string
	revision int64
}

type event struct {
	key, value string
	revision   int64
}

// A view is what one watcher got, in order.
type view struct {
	watcher, prefix string
	events          []event
}

type violation struct {
	Kind     string `json:"kind"`
	Watcher  string `json:"watcher"`
	Key      string `json:"key"`
	Value    string `json:"value"`
	Revision int64  `json:"revision"`
}

type ledger struct {
	mutex  sync.Mutex
	writes map[string]*write // by value
	floors map[string]int64  // last acknowledged revision by key
}

func newLedger() *ledger {
	return &ledger{writes: map[string]*write{}, floors: map[string]int64{}}
}

// Issued is called before the write is sent.
func (l *ledger) issued(value string, keys ...string) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.writes[value] = &write{keys: keys}
}

func (l *ledger) acknowledged(value string, revision int64) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.writes[value].revision = revision
	for _, key := range l.writes[value].keys {
		l.floors[key] = max(l.floors[key], revision)
	}
}

// Floor is the revision below which a linearizable read of the key that starts now is stale.
func (l *ledger) floor(key string) int64 {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.floors[key]
}

// Outcome counts the writes: acknowledged; of unknown outcome, and how many of these etcd's history has.
func (l *ledger) outcome(history []event) (acknowledged, ambiguous, applied int) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	there := map[string]bool{}
	for _, e := range history {
		there[e.value] = true
	}
	for value, w := range l.writes {
		switch {
		case w.revision > 0:
			acknowledged++
		case there[value]:
			ambiguous, applied = ambiguous+1, applied+1
		default:
			ambiguous++
		}
	}
	return acknowledged, ambiguous, applied
}

// Verify judges the views and the history itself; the history is a view of everything.
func (l *ledger) verify(views []view, history view) []violation {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	found := append([]violation{}, l.verifyOne(history)...)
	for _, v := range views {
		found = append(found, l.verifyOne(v)...)
		found = append(found, compare(v, history)...)
	}
	return found
}

func (l *ledger) verifyOne(v view) []violation {
	var found []violation
	add := func(kind string, e event) {
		found = append(found, violation{kind, v.watcher, e.key, e.value, e.revision})
	}
	last := int64(0)
	seen := map[event]bool{}
	revisions := map[[2]string]int64{} // by key and value
	for _, e := range v.events {
		if e.revision < last {
			add("disorder", e)
		}
		last = max(last, e.revision)
		if seen[e] {
			add("double", e)
			continue
		}
		seen[e] = true
		w := l.writes[e.value]
		written := [2]string{e.key, e.value}
		switch {
		case w == nil || !slices.Contains(w.keys, e.key):
			add("foreign", e)
		case revisions[written] > 0:
			add("applied_twice", e)
		case w.revision > 0 && w.revision != e.revision:
			add("wrong_revision", e)
		}
		revisions[written] = e.revision
	}
	for _, value := range slices.Sorted(maps.Keys(l.writes)) {
		w := l.writes[value]
		for _, key := range w.keys {
			if w.revision > 0 && strings.HasPrefix(key, v.prefix) && revisions[[2]string{key, value}] == 0 {
				add("lost", event{key, value, w.revision})
			}
		}
	}
	return found
}

// Compare tells what one side has and the other lacks, where a watcher and etcd's history should be equal.
func compare(v, history view) []violation {
	var found []violation
	got, there := map[event]bool{}, map[event]bool{}
	for _, e := range v.events {
		got[e] = true
	}
	for _, e := range history.events {
		there[e] = true
		if strings.HasPrefix(e.key, v.prefix) && !got[e] {
			found = append(found, violation{"missed", v.watcher, e.key, e.value, e.revision})
		}
	}
	for _, e := range v.events {
		if !there[e] || !strings.HasPrefix(e.key, v.prefix) {
			found = append(found, violation{"invented", v.watcher, e.key, e.value, e.revision})
		}
	}
	return found
}
