//! Names are found wherever the resolver of Go finds them, in real time: by the machine's files and by name servers
//! of the configuration.
//!
//! Each row of the table is a name server, or two, as somebody has one. The times of a lookup are such that a lookup
//! which waits for what never comes is not over within the test's limit.

use std::cell::RefCell;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use keyward::dial::names::{LookupTimes, NameAnswer, NameError, NameResolver, NameSource, ResolverSettings};
use keyward::tasks::Tasks;
use tempfile::TempDir;
use tokio::sync::Semaphore;

use crate::name_server::{
    A, AAAA, FORMERR, NOTIMP, NXDOMAIN, NameServer, Question, REFUSED, Reaction, SERVFAIL, Script, v4, v6,
};
use crate::rig::real;

/// No lookup of the table needs as long; one that waits for silence does.
const LIMIT: Duration = Duration::from_secs(25);
/// Longer than the limit: only the awaited answer ends a wait.
const PATIENCE: Duration = Duration::from_secs(60);
const NAME: &str = "m1.example.test";

fn addresses(all: &[IpAddr]) -> Reaction {
    Reaction::Addresses(all.to_vec())
}

fn script(does: impl Fn(&Question) -> Reaction + 'static) -> Script {
    Rc::new(does)
}

/// Answers A, and does this with AAAA.
fn aaaa(reaction: Reaction) -> Script {
    script(move |question| match question.kind {
        AAAA => reaction.clone(),
        _ => addresses(&[v4(1)]),
    })
}

fn always(reaction: Reaction) -> Script {
    script(move |_| reaction.clone())
}

fn plain() -> Script {
    always(addresses(&[v4(1)]))
}

/// A row of the table.
struct Row {
    what: &'static str,
    servers: Vec<Script>,
    options: &'static str,
    hosts: &'static str,
    name: &'static str,
    found: &'static [&'static str],
    times: LookupTimes,
}

impl Row {
    fn new(what: &'static str, servers: Vec<Script>) -> Self {
        let options = "options timeout:30";
        // A machine that stands still ends no lookup.
        let times = LookupTimes { shortest_limit: PATIENCE, ..LookupTimes::default() };
        Self { what, servers, options, hosts: "", name: NAME, found: &["10.0.0.1"], times }
    }

    /// True if the row is about a file of the machine.
    fn needs_files(&self) -> bool {
        !self.hosts.is_empty() || self.options.contains("search")
    }
}

fn late(milliseconds: u64) -> Reaction {
    Reaction::Late(Duration::from_millis(milliseconds), Box::new(addresses(&[v4(1)])))
}

/// Answers with the address where `has_answer`, and else does this.
fn answering(has_answer: impl Fn(&Question) -> bool + 'static, otherwise: Reaction) -> Script {
    script(move |question| if has_answer(question) { addresses(&[v4(1)]) } else { otherwise.clone() })
}

/// One server, which treats the families of addresses differently.
fn families() -> Vec<Row> {
    let six = |of_a: Reaction| {
        vec![script(move |question| match question.kind {
            A => of_a.clone(),
            _ => addresses(&[v6(1)]),
        })]
    };
    let late_six = Reaction::Late(Duration::from_secs(20), Box::new(addresses(&[v6(1)])));
    vec![
        Row::new("A and AAAA", vec![always(addresses(&[v4(1), v6(1)]))])
            .finding(&["10.0.0.1", "fd00::1"])
            .waiting(),
        Row::new("AAAA without records", vec![plain()]),
        Row::new("AAAA NXDOMAIN", vec![aaaa(Reaction::Code(NXDOMAIN))]),
        Row::new("AAAA SERVFAIL", vec![aaaa(Reaction::Code(SERVFAIL))]),
        Row::new("AAAA REFUSED", vec![aaaa(Reaction::Code(REFUSED))]),
        Row::new("AAAA NOTIMP", vec![aaaa(Reaction::Code(NOTIMP))]),
        Row::new("AAAA FORMERR", vec![aaaa(Reaction::Code(FORMERR))]),
        Row::new("AAAA silent", vec![aaaa(Reaction::Silence)]),
        Row::new("AAAA late", vec![aaaa(late_six)]),
        Row::new("A NXDOMAIN", six(Reaction::Code(NXDOMAIN))).finding(&["fd00::1"]),
        Row::new("A SERVFAIL", six(Reaction::Code(SERVFAIL))).finding(&["fd00::1"]),
        Row::new("A silent", six(Reaction::Silence)).finding(&["fd00::1"]),
    ]
}

/// One server with a trouble of its own.
fn servers() -> Vec<Row> {
    // The further questions: a machine that stands still asks more often than its settings say.
    let is_again = |question: &Question| question.of_kind > 1;
    let over_tcp = |question: &Question| question.over_tcp;
    let is_plain = |question: &Question| !question.extended;
    vec![
        Row::new("later than timeout", vec![always(late(1500))])
            .with("options timeout:1 attempts:2")
            .waiting(),
        Row::new("later than all attempts", vec![always(late(2500))])
            .with("options timeout:1 attempts:1")
            .waiting(),
        Row::new("truncated", vec![answering(over_tcp, Reaction::Truncated)]),
        Row::new("TCP alone", vec![answering(over_tcp, Reaction::Silence)]).with("options use-vc"),
        Row::new("a chain of names with TTL 0", vec![always(Reaction::Chain(vec![v4(1)]))]),
        Row::new("the first packets lost", vec![answering(is_again, Reaction::Silence)]),
        Row::new("SERVFAIL to the first questions", vec![answering(is_again, Reaction::Code(SERVFAIL))]),
        Row::new("no extensions known", vec![answering(is_plain, Reaction::Code(FORMERR))]),
        Row::new("extensions met with silence", vec![answering(is_plain, Reaction::Silence)])
            .with("options timeout:1")
            .waiting(),
        Row::new("no such name", vec![always(Reaction::Code(NXDOMAIN))]).finding(&[]),
    ]
}

/// Two servers, files, and names as people write them.
fn machines() -> Vec<Row> {
    let silence = || always(Reaction::Silence);
    let code = |code| always(Reaction::Code(code));
    let only = |name: &'static str| {
        let is_asked = move |question: &Question| question.name.eq_ignore_ascii_case(name);
        vec![answering(is_asked, Reaction::Code(NXDOMAIN))]
    };
    vec![
        Row::new("the first of two silent", vec![silence(), plain()]),
        Row::new("the first of two refuses", vec![code(REFUSED), plain()]),
        Row::new("the first of two fails", vec![code(SERVFAIL), plain()]),
        Row::new("the first of two refers", vec![always(Reaction::Referral), plain()]),
        Row::new("the second of two knows no name", vec![always(late(700)), code(NXDOMAIN)]).waiting(),
        Row::new("a search list", only("m1.b.example"))
            .with("search a.example b.example\noptions ndots:2")
            .named("m1"),
        Row::new("the hosts file", vec![silence()]).in_hosts("10.0.0.1 other etcd_1\n").named("etcd_1"),
        Row::new("localhost", vec![silence()]).named("LOCALHOST.").finding(&["127.0.0.1", "::1"]),
        Row::new("an underscore", only("project_etcd_1.default")).named("project_etcd_1.default"),
        Row::new("a dot at the end", only("etcd-1")).with("search a.example").named("etcd-1."),
    ]
}

impl Row {
    fn with(self, options: &'static str) -> Self {
        Self { options, ..self }
    }

    fn in_hosts(self, hosts: &'static str) -> Self {
        Self { hosts, ..self }
    }

    fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// The lookup waits for an answer that comes: a machine may stand still for longer than the usual times.
    fn waiting(self) -> Self {
        let times = LookupTimes { preferred_server: PATIENCE, other_family: PATIENCE, ..self.times };
        Self { times, ..self }
    }

    fn finding(self, found: &'static [&'static str]) -> Self {
        Self { found, ..self }
    }
}

/// Name servers at one port, and the files of a machine that has them.
struct Machine {
    servers: Vec<NameServer>,
    folder: TempDir,
}

impl Machine {
    async fn start(tasks: &Tasks, scripts: &[Script], options: &str, hosts: &str) -> Self {
        let mut servers = Vec::new();
        while servers.len() < scripts.len() {
            servers.clear();
            for (script, last) in scripts.iter().zip(1..) {
                let port = servers.first().map_or(0, |first: &NameServer| first.address.port());
                let at = (Ipv4Addr::new(127, 0, 0, last), port);
                // Another process may have the port at the second address.
                servers.extend(NameServer::start(tasks, at, Rc::clone(script)).await);
            }
        }
        let machine = Self { servers, folder: tempfile::tempdir().expect("a folder") };
        machine.write("hosts", hosts);
        machine.write_resolv_conf(options);
        machine
    }

    /// The file is replaced, as by those who write it.
    fn write(&self, file: &str, text: &str) {
        fs::write(self.path("new"), text).expect("written");
        fs::rename(self.path("new"), self.path(file)).expect("replaced");
    }

    fn write_resolv_conf(&self, options: &str) {
        let servers = self.servers.iter().map(|server| format!("nameserver {}\n", server.address.ip()));
        self.write("resolv.conf", &format!("{}{options}\n", servers.collect::<String>()));
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    fn by_files(&self) -> NameSource {
        let port = self.servers[0].address.port();
        NameSource::Machine { resolv_conf: self.path("resolv.conf"), hosts: self.path("hosts"), port }
    }

    fn by_servers(&self) -> NameSource {
        NameSource::Servers(self.servers.iter().map(|server| server.address).collect())
    }
}

fn resolver(source: NameSource, kept: Option<&Path>) -> NameResolver {
    let kept = kept.map(Path::to_owned);
    resolver_with(source, kept, LookupTimes::default())
}

fn resolver_with(source: NameSource, kept: Option<PathBuf>, times: LookupTimes) -> NameResolver {
    NameResolver::new(ResolverSettings { source, kept, times })
}

fn shown(found: &Result<NameAnswer<IpAddr>, NameError>) -> Vec<String> {
    let mut all: Vec<String> = found.iter().flat_map(|found| &found.all).map(ToString::to_string).collect();
    all.sort_unstable();
    all
}

#[test]
fn a_name_is_found_at_every_kind_of_name_server() {
    real(async {
        let (tasks, faults) = (Tasks::default(), RefCell::new(Vec::new()));
        let table = families().into_iter().chain(servers()).chain(machines());
        let rows = table.map(async |row| {
            let has_by_servers = !row.needs_files()
                && !["timeout:1", "use-vc"].iter().any(|option| row.options.contains(option));
            for way in ["files", "servers"].into_iter().take(1 + usize::from(has_by_servers)) {
                let machine = Machine::start(&tasks, &row.servers, row.options, row.hosts).await;
                let source = if way == "files" { machine.by_files() } else { machine.by_servers() };
                let names = resolver_with(source, None, row.times);
                match tokio::time::timeout(LIMIT, names.addresses(row.name)).await {
                    Err(_) => {
                        faults.borrow_mut().push(format!("{} by {way}: not within {LIMIT:?}", row.what))
                    }
                    Ok(found) if shown(&found) != row.found => {
                        faults.borrow_mut().push(format!("{} by {way}: {found:?}", row.what));
                    }
                    Ok(_) => {}
                }
            }
            1
        });
        let rows: usize = join_all(rows).await.into_iter().sum();
        assert!(rows > 25, "{rows}");
        assert_eq!(faults.into_inner(), Vec::<String>::new());
    });
}

/// Asks until `wanted` is the answer: what is asked in between may come before the change.
async fn until_found(names: &NameResolver, wanted: &[&str]) {
    let asking = async {
        while shown(&names.addresses(NAME).await) != wanted {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, asking).await.unwrap_or_else(|_| panic!("never found: {wanted:?}"));
}

#[test]
fn an_error_names_the_name_servers_and_what_they_did() {
    real(async {
        let tasks = Tasks::default();
        let scripts = [always(Reaction::Code(REFUSED)), always(Reaction::Code(SERVFAIL))];
        let machine = Machine::start(&tasks, &scripts, "", "").await;
        let error = resolver(machine.by_files(), None).addresses(NAME).await.unwrap_err().to_string();
        let server = |number: usize| machine.servers[number].address;
        assert_eq!(
            error,
            format!(
                "the name server {}: it answers REFUSED; the name server {}: it answers SERVFAIL",
                server(0),
                server(1)
            )
        );
        machine.servers[0].does(always(Reaction::Code(NXDOMAIN)));
        let error = resolver(machine.by_files(), None).addresses(NAME).await.unwrap_err().to_string();
        assert_eq!(error, format!("the name server {} does not know the name", server(0)));
    });
}

#[test]
fn both_files_are_followed() {
    real(async {
        let tasks = Tasks::default();
        let machine = Machine::start(&tasks, &[plain()], "", "").await;
        let other = Machine::start(&tasks, &[plain(), always(addresses(&[v4(2)]))], "", "").await;
        let source = NameSource::Machine {
            resolv_conf: machine.path("resolv.conf"),
            hosts: machine.path("hosts"),
            port: other.servers[0].address.port(),
        };
        let names = resolver(source, None);
        until_found(&names, &["10.0.0.1"]).await;
        machine.write("resolv.conf", "nameserver 127.0.0.2\n");
        until_found(&names, &["10.0.0.2"]).await;
        machine.write("hosts", &format!("10.0.0.3 {NAME}\n"));
        until_found(&names, &["10.0.0.3"]).await;
        machine.write("hosts", "");
        until_found(&names, &["10.0.0.2"]).await;
    });
}

/// A caller with a short limit, such as a dial, gives the first lookup up; the second has its answer.
#[test]
fn the_answer_to_a_question_that_was_given_up_serves_the_next_asker() {
    real(async {
        let tasks = Tasks::default();
        let asked = Rc::new(tokio::sync::Notify::new());
        let seen = Rc::clone(&asked);
        let late = script(move |question| {
            seen.notify_one();
            match question.of_kind {
                // Both families of the first lookup.
                1 => Reaction::Late(Duration::from_millis(300), Box::new(addresses(&[v4(1)]))),
                _ => Reaction::Silence,
            }
        });
        let machine = Machine::start(&tasks, &[late], "", "").await;
        let names = resolver(machine.by_servers(), None);
        tokio::select! {
            _ = names.addresses(NAME) => panic!("the server has not answered"),
            () = asked.notified() => {}
        }
        let found = tokio::time::timeout(LIMIT, names.addresses(NAME)).await.expect("answered");
        assert_eq!(shown(&found), ["10.0.0.1"]);
    });
}

/// An address of the other family that comes late is known from then on.
#[test]
fn the_late_answer_for_the_other_family_is_taken() {
    real(async {
        let tasks = Tasks::default();
        let gate = Rc::new(Semaphore::new(0));
        let late = Reaction::Held(Rc::clone(&gate), Box::new(addresses(&[v6(1)])));
        let machine = Machine::start(&tasks, &[aaaa(late)], "", "").await;
        let names = resolver(machine.by_servers(), None);
        assert_eq!(shown(&names.addresses(NAME).await), ["10.0.0.1"]);
        gate.close();
        until_found(&names, &["10.0.0.1", "fd00::1"]).await;
    });
}

#[test]
fn the_last_known_addresses_serve_while_name_servers_fail_also_after_a_restart() {
    real(async {
        let tasks = Tasks::default();
        let machine = Machine::start(&tasks, &[plain()], "", "").await;
        let kept = machine.path("names.json");
        let names = resolver(machine.by_servers(), Some(&kept));
        until_found(&names, &["10.0.0.1"]).await;
        for failing in [Reaction::Silence, Reaction::Code(SERVFAIL)] {
            machine.servers[0].does(always(failing));
            let found = names.addresses(NAME).await.expect("known");
            assert_eq!((found.all, found.is_old), (vec![v4(1)], true));
        }
        let trouble = async {
            loop {
                if let [trouble] = &names.troubles()[..] {
                    return trouble.clone();
                }
                drop(names.addresses(NAME).await);
            }
        };
        let trouble = tokio::time::timeout(LIMIT, trouble).await.expect("told");
        let server = machine.servers[0].address.to_string();
        assert!(trouble.about == NAME && trouble.what.contains(&server) && trouble.is_served, "{trouble:?}");
        let written = async {
            while !kept.exists() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, written).await.expect("the file is written");
        drop(names);
        let names = resolver(machine.by_servers(), Some(&kept));
        assert_eq!(shown(&names.addresses(NAME).await), ["10.0.0.1"], "of the file");
        let whole = fs::read(&kept).expect("a file");
        fs::write(&kept, &whole[..whole.len() / 2]).expect("cut");
        assert!(resolver(machine.by_servers(), Some(&kept)).addresses(NAME).await.is_err(), "a damaged file");
        machine.servers[0].does(always(addresses(&[v4(2)])));
        until_found(&names, &["10.0.0.2"]).await;
        let ended = async {
            while !names.troubles().is_empty() {
                drop(names.addresses(NAME).await);
            }
        };
        tokio::time::timeout(LIMIT, ended).await.expect("the trouble is over");
    });
}

/// Unlike silence, a server's word that a name is gone is believed.
#[test]
fn an_address_that_a_name_server_takes_back_is_not_used() {
    real(async {
        let tasks = Tasks::default();
        let machine = Machine::start(&tasks, &[plain()], "", "").await;
        let names = resolver(machine.by_servers(), None);
        until_found(&names, &["10.0.0.1"]).await;
        machine.servers[0].does(always(Reaction::Code(NXDOMAIN)));
        let asking = async { while names.addresses(NAME).await.is_ok() {} };
        tokio::time::timeout(LIMIT, asking).await.expect("it is gone");
    });
}

/// Ten askers of one name put one question.
#[test]
fn askers_of_one_name_share_a_lookup() {
    real(async {
        let tasks = Tasks::default();
        let late = Reaction::Late(Duration::from_millis(300), Box::new(addresses(&[v4(1), v6(1)])));
        let machine = Machine::start(&tasks, &[always(late)], "", "").await;
        let names = resolver(machine.by_servers(), None);
        let asked = join_all((0..10).map(|_| names.addresses(NAME))).await;
        assert!(asked.iter().all(|found| shown(found).len() == 2), "{asked:?}");
        // A and AAAA, and the repetitions of packets that may be lost.
        assert!(machine.servers[0].questions.get() <= 4, "{}", machine.servers[0].questions.get());
    });
}

#[test]
fn a_dead_server_beside_one_that_answers_is_told() {
    real(async {
        let tasks = Tasks::default();
        let machine = Machine::start(&tasks, &[always(Reaction::Silence), plain()], "", "").await;
        let names = resolver(machine.by_servers(), None);
        let told = async {
            while names.troubles().is_empty() {
                assert_eq!(shown(&names.addresses(NAME).await), ["10.0.0.1"]);
            }
        };
        tokio::time::timeout(LIMIT, told).await.expect("told");
        let about: SocketAddr = machine.servers[0].address;
        assert_eq!(names.troubles()[0].about, format!("name server {about}"));
    });
}
