//! An operator's command, asked of the replicas of the fleet.
//!
//! Owns: which replicas are asked, the time limits, and the names of the replicas. Must not know: the
//! execution of a command, how answers are printed. Invariants: nobody is asked while nobody looks; all
//! replicas are asked at the same time, and one that does not answer costs its time limit once; each process
//! executes a command once, however many addresses lead to it; an answer counts only if sealed for its
//! request, so what is not sealed is no proof that nothing was done.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use http::StatusCode;
use tokio::time::timeout;

use super::fleet_door::fitting;
use super::fleet_seal::{SEAL_BYTES, Unsealable, open_answer, seal_request};
use super::{Fleet, FleetOrder, FleetReply, FleetRequest, FleetWelcome, MOST_ANSWER_BYTES, PATH};
use crate::admin::operator_actions::CommandOrigin;
use crate::admin::socket_protocol::{
    AdminAnswer, FleetCommand, FleetQuestion, ReplicaAnswer, ReplicaOutcome,
};
use crate::admin::view::ViewTopic;
use keyward_base::io::http_exchange::{ExchangeError, post};
use keyward_base::io::tcp_connect::connect_tcp;
use keyward_telemetry::printable::escaped;

/// Time limit for a connection and a hello.
const HELLO: Duration = Duration::from_secs(2);
/// Time limit for the answer to a command, from its connection on.
const ANSWER: Duration = Duration::from_secs(6);
/// Addresses asked for one command; a name may stand for many.
const MOST_ADDRESSES: usize = 128;
/// Characters of the user named by SUDO_USER.
const LONGEST_USER: usize = 64;
/// Bytes of a hello's answer.
const LONGEST_WELCOME: usize = 4096;
/// Bytes of an answer beside its rows.
const ANSWER_FRAME: usize = 64 * 1024;
/// Bytes of an answer without rows: a status has some hundred for each member.
const PLAIN_ANSWER: usize = 1 << 20;

/// Why a replica gave no answer.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("{0}")]
    Unconnected(#[from] std::io::Error),
    #[error("{0}")]
    Exchange(#[from] ExchangeError),
    #[error("{0}")]
    Unsealed(#[from] Unsealable),
    #[error(
        "it takes no sealed request of this replica (HTTP status {0}): it has no admin.replicas, another \
         session.key_files, realm or cluster, or another version"
    )]
    Refused(StatusCode),
    #[error(
        "HTTP status {0} to a sealed command after a sealed welcome: it has restarted, or is of another \
         version, or somebody on the way has answered"
    )]
    TurnedAway(StatusCode),
    #[error("the answer is not sealed by a replica of the fleet")]
    Foreign,
    #[error("the answer is not one of this version")]
    Unreadable,
    #[error("it is busy with other commands: repeat the command in a moment")]
    Busy,
}

/// A replica that has named itself.
struct FoundReplica {
    name: String,
    /// True for this process.
    is_here: bool,
    /// All addresses that lead there.
    addresses: Vec<SocketAddr>,
    welcome: FleetWelcome,
}

impl FoundReplica {
    fn new(is_here: bool, addresses: Vec<SocketAddr>, welcome: FleetWelcome) -> Self {
        Self { name: String::new(), is_here, addresses, welcome }
    }
}

impl Fleet {
    /// Asks the replicas, this one included.
    pub(in crate::admin) async fn ask(&self, question: FleetQuestion, uid: Option<u32>) -> AdminAnswer {
        if let Some(lack) = self.lack() {
            return AdminAnswer::Failed(lack.to_owned());
        }
        if (FleetCommand::Show { topic: ViewTopic::Replicas }) == question.command {
            return AdminAnswer::Failed("keyward show replicas shows all replicas by itself".into());
        }
        let claim = question.sudo_user.filter(|_| uid == Some(0));
        let sudo_user = claim.map(|name| escaped(&name.chars().take(LONGEST_USER).collect::<String>()));
        let by = CommandOrigin { uid, sudo_user, replica: None };
        let (mut found, mut answers) = self.find().await;
        let own_name = found.first().map(|own| own.name.clone()).unwrap_or_default();
        if let Some(only) = &question.only {
            let is_meant = |answer: &ReplicaAnswer| answer.replica == *only;
            match chosen(found, only) {
                Ok(one) => (found, answers) = (vec![one], Vec::new()),
                Err(_) if answers.iter().any(is_meant) => {
                    found = Vec::new();
                    answers.retain(is_meant);
                }
                Err(reason) => return AdminAnswer::Failed(reason),
            }
        }
        let (command, others) = (&question.command, found.iter().filter(|replica| !replica.is_here).count());
        if others > 0 && command.is_order() {
            tracing::info!(
                %command,
                replicas = others,
                uid = by.uid,
                sudo_user = by.sudo_user,
                "an operator gives an order to other replicas"
            );
        }
        let most_bytes = MOST_ANSWER_BYTES / found.len().max(1);
        let by = (&by, own_name.as_str());
        let asked = found.into_iter().map(|replica| self.ask_one(replica, command, by, most_bytes));
        AdminAnswer::Fleet(join_all(asked).await.into_iter().chain(answers).collect())
    }

    /// Executes the command here, or gives it to another replica, in the name of the operator at this one.
    async fn ask_one(
        &self,
        replica: FoundReplica,
        command: &FleetCommand,
        (by, own_name): (&CommandOrigin, &str),
        most_bytes: usize,
    ) -> ReplicaAnswer {
        let outcome = match replica.addresses.first() {
            Some(address) if !replica.is_here => {
                let by = CommandOrigin { replica: Some(own_name.to_owned()), ..by.clone() };
                self.order((*address, &replica.welcome), command.clone(), by, most_bytes).await
            }
            _ => {
                let answer = self.commands.execute(command.clone().into(), by).await;
                ReplicaOutcome::Answered(Box::new(fitting(answer, most_bytes)))
            }
        };
        let addresses = replica.addresses.iter().map(ToString::to_string).collect();
        ReplicaAnswer { replica: replica.name, addresses, outcome }
    }

    /// The replicas that answer, this one first, each process once; and the answers of the others.
    async fn find(&self) -> (Vec<FoundReplica>, Vec<ReplicaAnswer>) {
        let unreached = |address: String, why: String| ReplicaAnswer {
            replica: address.clone(),
            addresses: vec![address],
            outcome: ReplicaOutcome::Unreached(escaped(&why)),
        };
        let own = self.welcome();
        let mut found = vec![FoundReplica::new(true, Vec::new(), own)];
        let mut silent = Vec::new();
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for (name, of_name) in self.viewer.others.all_addresses().await {
            match of_name {
                Ok(of_name) => addresses.extend(of_name),
                Err(why) => silent.push(unreached(name, why)),
            }
        }
        addresses.sort_unstable();
        addresses.dedup();
        for more in addresses.split_off(addresses.len().min(MOST_ADDRESSES)) {
            silent.push(unreached(more.to_string(), format!("not asked: more than {MOST_ADDRESSES}")));
        }
        let hello = |address| async move { (address, self.hello(address).await) };
        let hellos = addresses.into_iter().map(hello);
        for (address, answer) in join_all(hellos).await {
            match answer {
                Ok(welcome) => {
                    match found.iter_mut().find(|known| known.welcome.process == welcome.process) {
                        Some(known) => known.addresses.push(address),
                        None => found.push(FoundReplica::new(false, vec![address], welcome)),
                    }
                }
                Err(why) => silent.push(unreached(address.to_string(), why.to_string())),
            }
        }
        name_all(&mut found);
        (found, silent)
    }

    async fn hello(&self, address: SocketAddr) -> Result<FleetWelcome, NoAnswer> {
        let hello = FleetRequest::Hello(self.scope());
        let asked = self.exchange(address, &hello, LONGEST_WELCOME);
        match timeout(HELLO, asked).await.map_err(|_| NoAnswer::Late(HELLO))?? {
            FleetReply::Welcome(welcome) => Ok(welcome),
            FleetReply::Answer(_) | FleetReply::Busy {} => Err(NoAnswer::Foreign),
        }
    }

    /// Gives a command to the process that named itself at this address.
    async fn order(
        &self,
        (address, welcome): (SocketAddr, &FleetWelcome),
        command: FleetCommand,
        by: CommandOrigin,
        most_bytes: usize,
    ) -> ReplicaOutcome {
        let longest = match command {
            FleetCommand::Show { .. } => most_bytes + ANSWER_FRAME,
            _ => PLAIN_ANSWER,
        };
        let order = FleetRequest::Command(Box::new(FleetOrder {
            scope: self.scope(),
            process: welcome.process.clone(),
            millis: welcome.millis,
            by,
            command,
            most_bytes,
        }));
        let asked = timeout(ANSWER, self.exchange(address, &order, longest + SEAL_BYTES)).await;
        match asked.unwrap_or(Err(NoAnswer::Late(ANSWER))) {
            Ok(FleetReply::Answer(answer)) => ReplicaOutcome::Answered(answer),
            Ok(FleetReply::Busy {}) => ReplicaOutcome::Unreached(NoAnswer::Busy.to_string()),
            Ok(FleetReply::Welcome(_)) => ReplicaOutcome::Unknown(NoAnswer::Foreign.to_string()),
            // The status is not sealed: whoever passed the order on may have answered so.
            Err(NoAnswer::Refused(status)) => {
                ReplicaOutcome::Unknown(NoAnswer::TurnedAway(status).to_string())
            }
            Err(why @ (NoAnswer::Unconnected(_) | NoAnswer::Unsealed(_))) => {
                ReplicaOutcome::Unreached(escaped(&why.to_string()))
            }
            Err(why) => ReplicaOutcome::Unknown(escaped(&why.to_string())),
        }
    }

    /// Sends a request over a connection of its own, and opens the answer.
    async fn exchange(
        &self,
        address: SocketAddr,
        request: &FleetRequest,
        longest: usize,
    ) -> Result<FleetReply, NoAnswer> {
        let text = serde_json::to_vec(request).map_err(|_| NoAnswer::Unreadable)?;
        let (message, id) = seal_request(&self.sealer, &text)?;
        let stream = connect_tcp(address).await?;
        // By the address: the other replica need not know the name that led there.
        let authority = SocketAddr::new(address.ip(), address.port()).to_string();
        let (head, body) = post(stream, &authority, PATH, message.into(), longest).await?;
        if head.status != StatusCode::OK {
            return Err(NoAnswer::Refused(head.status));
        }
        let text = open_answer(&self.sealer, id, &body).ok_or(NoAnswer::Foreign)?;
        serde_json::from_slice(&text).map_err(|_| NoAnswer::Unreadable)
    }
}

/// The name of a replica that is alone on its host.
fn hosted(welcome: &FleetWelcome) -> String {
    welcome.host.as_deref().map_or_else(|| welcome.pid.to_string(), escaped)
}

/// Names each replica by its host; where a host has several also by the process, and where containers have
/// one host name and one process id also by the address.
fn name_all(found: &mut [FoundReplica]) {
    let forms: Vec<[String; 3]> = found.iter().map(names_of).collect();
    for (replica, own) in found.iter_mut().zip(&forms) {
        let is_alone = |form: &usize| forms.iter().filter(|other| other[*form] == own[*form]).count() == 1;
        let form = (0..own.len()).find(is_alone).unwrap_or(own.len() - 1);
        replica.name.clone_from(&own[form]);
    }
}

/// The names of a replica, the shortest first.
fn names_of(replica: &FoundReplica) -> [String; 3] {
    let host = hosted(&replica.welcome);
    let of_process = format!("{host}:{}", replica.welcome.pid);
    let address = replica.addresses.first().map_or_else(|| "here".to_owned(), ToString::to_string);
    let of_address = format!("{of_process}@{address}");
    [host, of_process, of_address]
}

/// The replica with this name or admin address.
fn chosen(found: Vec<FoundReplica>, only: &str) -> Result<FoundReplica, String> {
    let is_meant = |replica: &FoundReplica| {
        replica.name == only || replica.addresses.iter().any(|address| address.to_string() == only)
    };
    let names: Vec<&str> = found.iter().map(|replica| replica.name.as_str()).collect();
    let names = names.join(", ");
    let mut meant = found.into_iter().filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => Err(format!("{only:?} names several replicas: give the admin address of one")),
        (None, _) => Err(format!("no replica {only:?}: there are {names}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(host: &str, pid: u32, addresses: &[&str]) -> FoundReplica {
        let welcome = FleetWelcome { process: format!("{pid}"), millis: 0, host: Some(host.to_owned()), pid };
        let addresses: Vec<SocketAddr> =
            addresses.iter().map(|address| address.parse().expect("an address")).collect();
        FoundReplica::new(addresses.is_empty(), addresses, welcome)
    }

    fn names(found: &mut [FoundReplica]) -> Vec<&str> {
        name_all(found);
        found.iter().map(|replica| replica.name.as_str()).collect()
    }

    #[test]
    fn replicas_are_named_by_host_and_where_that_is_not_enough_by_process_and_address() {
        let mut found = vec![
            replica("a", 7, &[]),
            replica("b", 7, &["10.0.0.2:2389"]),
            replica("b\x1b", 8, &["10.0.0.3:2389"]),
            replica("b", 9, &["10.0.0.2:2390", "[fd00::2]:2390"]),
        ];
        assert_eq!(names(&mut found), ["a", "b:7", "b\\u{1b}", "b:9"]);
        assert_eq!(chosen(found, "[fd00::2]:2390").expect("any of its addresses").name, "b:9");
        let mut found = vec![replica("a", 7, &[]), replica("a", 8, &[])];
        name_all(&mut found);
        let error = chosen(found, "a").err().expect("two are meant");
        assert_eq!(error, "no replica \"a\": there are a:7, a:8");
        let mut found = vec![
            replica("kw", 1, &[]),
            replica("kw", 1, &["10.0.0.2:2389"]),
            replica("c", 1, &["10.0.0.3:1"]),
        ];
        assert_eq!(names(&mut found), ["kw:1@here", "kw:1@10.0.0.2:2389", "c"]);
    }

    #[test]
    fn a_name_of_two_replicas_chooses_none() {
        let mut found = vec![replica("kw", 1, &["10.0.0.2:1"]), replica("kw:1", 2, &["10.0.0.3:1"])];
        found.push(replica("kw", 2, &["10.0.0.4:1"]));
        assert_eq!(names(&mut found), ["kw:1", "kw:1", "kw:2"]);
        let error = chosen(found, "kw:1").err().expect("two are meant");
        assert!(error.contains("several"), "{error}");
    }
}
