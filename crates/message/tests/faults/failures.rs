//! Every system call fails once, wherever it is made.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStderr, ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::{CrossMemoryDenied, EndpointBuilder, Error, Listener, Rights};
use memferry_sys::fault::{Call, FaultPlan, arm, disarm, for_each_failure};
use memferry_testing::HangGuard;

use crate::flows::Flow;
use crate::subject::{SubjectCommand, WARMUP_ROUNDS};
use memferry_testing::message::process::{self, Child};
use memferry_testing::message::traces::resource_usage;
use memferry_testing::message::{alone, pair, say, unique, until};

/// A process that runs flows on command, and replies.
struct Subject {
    commands: ChildStdin,
    replies: BufReader<ChildStderr>,
    _child: Child,
}

struct SubjectReply {
    outcome: Result<(), String>,
    fired: Option<String>,
    counts: Vec<u64>,
}

impl Subject {
    fn start() -> Self {
        let mut command = process::command("subject");
        let mut child = Child::spawn(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
        let (orders, answers) = (child.take_input(), BufReader::new(child.take_errors()));
        Self { commands: orders, replies: answers, _child: child }
    }

    fn send_command(&mut self, order: &SubjectCommand) {
        writeln!(self.commands, "{}", order.to_line()).expect("the subject reads its input");
    }

    /// The reply, or the status of a subject that has exited instead.
    fn read_reply(&mut self) -> Result<SubjectReply, String> {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        let words: Vec<&str> = line.trim_end().split('\t').collect();
        let [outcome, fired, counts] = words[..] else {
            let mut rest = line;
            let _ = std::io::Read::read_to_string(&mut self.replies, &mut rest);
            return Err(rest);
        };
        Ok(SubjectReply {
            outcome: if outcome == "ok" { Ok(()) } else { Err(outcome.to_owned()) },
            fired: (fired != "-").then(|| fired.to_owned()),
            counts: counts.split(' ').map(|count| count.parse().unwrap()).collect(),
        })
    }
}

/// The state of a run through all calls of a flow.
struct FaultWalk {
    number: usize,
    flow: Flow,
    subject: Subject,
    listener: Listener,
    /// Faults so far, by call: the total, and those that were no error for the caller.
    table: BTreeMap<Call, (u64, u64)>,
    call_sites: std::collections::BTreeSet<String>,
    slowest: (Duration, String),
}

impl FaultWalk {
    /// One flow, with both processes; returns the subject's result.
    fn round(&mut self, plan: FaultPlan) -> SubjectReply {
        let what = format!("{}: {plan:?}", self.flow.name());
        let (flow, began) = (self.flow, Instant::now());
        let name = if flow.subject_dials { self.listener_name() } else { unique("subject") };
        self.subject.send_command(&SubjectCommand { flow: self.number, name: name.clone(), plan });
        let _guard = HangGuard::new(&what);
        let is_over = AtomicBool::new(false);
        let (answer, survived) = std::thread::scope(|scope| {
            let survivor = scope.spawn(|| flow.run_survivor(&self.listener, &name, &is_over));
            let answer = self.subject.read_reply();
            is_over.store(true, Ordering::Release);
            (answer, survivor.join().expect("the survivor succeeds"))
        });
        let answer = answer.unwrap_or_else(|why| panic!("{what}: the subject ended: {why}"));
        match (&answer.outcome, survived) {
            (Ok(()), Ok(())) => {}
            (Ok(()), Err(error)) => panic!("{what}: the subject is done, the survivor: {error}"),
            (Err(error), _) => {
                assert!(answer.fired.is_some(), "{what}: failed without a fault: {error}");
            }
        }
        let took = began.elapsed();
        if took > self.slowest.0 {
            self.slowest = (took, what);
        }
        answer
    }

    fn listener_name(&self) -> String {
        format!("faults-survivor-{}-{}", std::process::id(), self.number)
    }

    /// Makes a call fail; returns whether it was made.
    fn fail(&mut self, plan: FaultPlan) -> bool {
        let FaultPlan::Fail { call, .. } = plan else { return false };
        let answer = self.round(plan);
        let Some(place) = answer.fired else { return false };
        self.call_sites.insert(place);
        let row = self.table.entry(call).or_default();
        (row.0, row.1) = (row.0 + 1, row.1 + u64::from(answer.outcome.is_ok()));
        // The next attempt works.
        self.round(FaultPlan::Count).outcome.unwrap();
        true
    }
}

#[test]
fn every_system_call_that_fails_is_survived_or_told() {
    let _alone = alone();
    let mut total: BTreeMap<Call, (u64, u64)> = BTreeMap::new();
    let mut places = std::collections::BTreeSet::new();
    for (number, flow) in Flow::all().into_iter().enumerate() {
        if std::env::var("MEMFERRY_FLOW").is_ok_and(|only| !flow.name().contains(&only)) {
            continue;
        }
        let name = format!("faults-survivor-{}-{number}", std::process::id());
        let mut walk = FaultWalk {
            number,
            flow,
            subject: Subject::start(),
            listener: flow.listen(&name).unwrap(),
            table: BTreeMap::new(),
            call_sites: std::collections::BTreeSet::new(),
            slowest: (Duration::ZERO, String::new()),
        };
        for _ in 1..WARMUP_ROUNDS {
            walk.round(FaultPlan::Count).outcome.unwrap();
        }
        let counts = walk.round(FaultPlan::Count).counts;
        let before = resource_usage();
        let is_made = |(call, count): (&Call, u64)| (count > 0).then_some(*call);
        let calls: Vec<Call> = Call::ALL.iter().zip(counts).filter_map(is_made).collect();
        for_each_failure(&calls, true, |plan| walk.fail(plan));
        until("the survivor has what it had", || {
            // A poll detects a process that gave up before it was accepted.
            let _ = walk.listener.poll_accept();
            let now = resource_usage();
            now.descriptors <= before.descriptors && now.mappings <= before.mappings
        });
        let faults: u64 = walk.table.values().map(|row| row.0).sum();
        let fine: u64 = walk.table.values().map(|row| row.1).sum();
        say(format_args!(
            "{}: {faults} failed calls, {fine} of them without an error; slowest {:?} ({})",
            flow.name(),
            walk.slowest.0,
            walk.slowest.1
        ));
        for (call, row) in walk.table {
            let sum = total.entry(call).or_default();
            (sum.0, sum.1) = (sum.0 + row.0, sum.1 + row.1);
        }
        places.extend(walk.call_sites);
    }
    for (call, (faults, fine)) in &total {
        say(format_args!("{call:?}: {faults} times, {fine} without an error"));
    }
    let faults: u64 = total.values().map(|row| row.0).sum();
    let (kinds, places) = (total.len(), places.len());
    assert!(faults > 0, "nothing failed");
    say(format_args!(
        "row\tcalls of messages that failed\t{faults}\tof {kinds} kinds, at {places} places"
    ));
}

#[test]
fn a_peer_whose_memory_was_gone_when_it_was_tried_is_not_taken_for_one_of_another_namespace() {
    let _alone = alone();
    for call in [Call::ProcessVmReadv, Call::ProcessVmWritev] {
        // As for a process that is exiting; this one is not, as if only its main thread had exited.
        arm(FaultPlan::Fail { call, nth: 1, error: libc::ESRCH, is_persistent: false });
        let sides = pair(&EndpointBuilder::new());
        disarm();
        let puts =
            [(&sides.here, sides.to_there), (&sides.there, sides.to_here)].map(|(at, peer)| {
                let owner = if peer == sides.to_there { &sides.there } else { &sides.here };
                let window = owner.expose(vec![1; 100], Rights::READ_WRITE).unwrap();
                let put =
                    at.attach(peer, window.handle()).and_then(|remote| remote.put(0, &[7; 8]));
                drop(window.withdraw());
                put
            });
        let ended = Err(Error::Unreachable(Some(CrossMemoryDenied::Exited)));
        assert!(puts.contains(&ended), "{call:?}: {puts:?}");
        assert!(puts.iter().all(|put| *put == ended || put.is_ok()), "{call:?}: {puts:?}");
    }
}
