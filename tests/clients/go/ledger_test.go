package main

import (
	"slices"
	"testing"
)

// A run of three acknowledged writes, one of them a Txn of two keys, and one of unknown outcome that etcd did apply.
func sample() (*ledger, view) {
	l := newLedger()
	l.issued("a", "/w/0/k")
	l.acknowledged("a", 5)
	l.issued("b", "/w/0/k", "/w/1/k")
	l.acknowledged("b", 6)
	l.issued("c", "/w/1/k")
	l.issued("d", "/w/1/k")
	l.acknowledged("d", 9)
	l.issued("never", "/w/1/k")
	return l, view{"history", "/w/", []event{
		{"/w/0/k", "a", 5}, {"/w/0/k", "b", 6}, {"/w/1/k", "b", 6}, {"/w/1/k", "c", 8}, {"/w/1/k", "d", 9},
	}}
}

func kinds(found []violation) []string {
	names := []string{}
	for _, v := range found {
		if v.Watcher != "history" {
			names = append(names, v.Kind)
		}
	}
	return names
}

func TestALedgerAcceptsWhatEtcdDid(t *testing.T) {
	l, history := sample()
	own := view{"w1", "/w/1/", slices.Clone(history.events[2:])}
	if found := l.verify([]view{{"w", "/w/", history.events}, own}, history); len(found) > 0 {
		t.Error(found)
	}
	if acknowledged, ambiguous, applied := l.outcome(history.events); acknowledged != 3 || ambiguous != 2 || applied != 1 {
		t.Error(acknowledged, ambiguous, applied)
	}
	if l.floor("/w/0/k") != 6 || l.floor("/w/1/k") != 9 {
		t.Error(l.floors)
	}
}

func TestALedgerNamesEachFault(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func([]event) []event
		want  []string
	}{
		"acknowledged event lost": {func(e []event) []event { return slices.Delete(e, 1, 2) }, []string{"lost", "missed"}},
		"unknown outcome missed":  {func(e []event) []event { return slices.Delete(e, 3, 4) }, []string{"missed"}},
		"event twice":             {func(e []event) []event { return append(e, e[4]) }, []string{"double"}},
		"older event again":       {func(e []event) []event { return append(e, e[0]) }, []string{"disorder", "double"}},
		"revision goes back":      {func(e []event) []event { e[3], e[4] = e[4], e[3]; return e }, []string{"disorder"}},
		"event of another run":    {func(e []event) []event { return append(e, event{"/w/0/k", "x", 10}) }, []string{"foreign", "invented"}},
		"another watch's event":   {func(e []event) []event { return append(e, event{"/w/1/k", "a", 9}) }, []string{"foreign", "invented"}},
		"write applied twice":     {func(e []event) []event { return append(e, event{"/w/1/k", "c", 9}) }, []string{"applied_twice", "invented"}},
		"revision not as told":    {func(e []event) []event { e[4].revision = 10; return e }, []string{"wrong_revision", "missed", "invented"}},
	} {
		l, history := sample()
		spoilt := view{"w", "/w/", c.spoil(slices.Clone(history.events))}
		if got := kinds(l.verify([]view{spoilt}, history)); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}
