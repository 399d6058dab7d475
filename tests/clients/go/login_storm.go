// Many clients that log in at once, some with a wrong password, each then using what it may use.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
)

type account struct{ user, password string }

// A login is one client to be: Wrong ones must not get in.
type login struct {
	account
	wrong bool
}

type loginStorm struct {
	*options
	usersFile    string
	right, wrong int
	seed         uint64

	mutex    sync.Mutex
	outcomes map[string]int
}

func loginStormScenario(flags *flag.FlagSet, o *options) func() error {
	s := &loginStorm{options: o, outcomes: map[string]int{}}
	flags.StringVar(&s.usersFile, "users-file", "", "lines of `user password`; each user may use /u/USER/")
	flags.IntVar(&s.right, "clients", 200, "clients with the right password, over the users in turn")
	flags.IntVar(&s.wrong, "wrong", 50, "clients with a wrong password among them")
	flags.Uint64Var(&s.seed, "seed", 1, "order of the clients")
	return s.run
}

func (s *loginStorm) run() error {
	accounts, err := readAccounts(s.usersFile)
	if err != nil {
		return err
	}
	logins := make([]login, s.right+s.wrong)
	for i := range logins {
		logins[i].account = accounts[i%len(accounts)]
		if i >= s.right {
			logins[i].wrong = true
			logins[i].password += "-not"
		}
	}
	rand.New(rand.NewPCG(s.seed, s.seed)).Shuffle(len(logins), func(i, j int) { logins[i], logins[j] = logins[j], logins[i] })

	gate := make(chan struct{})
	var all sync.WaitGroup
	for number, login := range logins {
		all.Go(func() {
			<-gate
			s.attempt(number, login)
		})
	}
	close(gate)
	all.Wait()
	summary := fields{"clients": s.right, "wrong": s.wrong, "seed": s.seed}
	for _, name := range []string{"admitted", "rejected", "wrong_admitted", "wrong_rejected", "access_failed"} {
		summary[name] = s.outcomes[name]
	}
	emit("summary", summary)
	return nil
}

func (s *loginStorm) attempt(number int, login login) {
	begun := elapsed()
	client, err := s.dialAs(s.endpoints, login.user, login.password)
	code, message := describe(err)
	emit("login", fields{
		"client": number, "user": login.user, "wrong": login.wrong, "ok": err == nil,
		"code": code, "message": message, "start": begun, "end": elapsed(),
	})
	outcome := "admitted"
	if err != nil {
		outcome = "rejected"
	}
	if login.wrong {
		outcome = "wrong_" + outcome
	}
	s.count(outcome)
	if err != nil {
		return
	}
	defer client.Close()
	if !s.access(client, fmt.Sprintf("/u/%s/%d", login.user, number)) {
		s.count("access_failed")
	}
}

func (s *loginStorm) access(client *clientv3.Client, key string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), s.loginTimeout)
	defer cancel()
	begun := elapsed()
	if _, err := client.Get(ctx, key); err != nil {
		emitError("get", begun, err, fields{"key": key})
		return false
	}
	begun = elapsed()
	if _, err := client.Put(ctx, key, "here"); err != nil {
		emitError("put", begun, err, fields{"key": key})
		return false
	}
	return true
}

func (s *loginStorm) count(outcome string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.outcomes[outcome]++
}

func readAccounts(path string) ([]account, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var accounts []account
	for lines := bufio.NewScanner(file); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		if len(words) != 2 {
			return nil, errors.New("the users file has a line that is not `user password`")
		}
		accounts = append(accounts, account{words[0], words[1]})
	}
	if len(accounts) == 0 {
		return nil, errors.New("the users file names nobody")
	}
	return accounts, nil
}
