//! Every system call fails, wherever it is made.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStderr, ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::{Builder, Denied, Error, Listener, Rights};
use memferry_sys::fault::{Call, Plan, arm, disarm, each_failure};
use memferry_testing::HangGuard;

use crate::flows::Flow;
use crate::subject::{Order, WARM_UP};
use crate::support::process::{self, Child};
use crate::support::traces::holdings;
use crate::support::{alone, pair, say, unique, until};

/// A process that walks flows and answers.
struct Subject {
    orders: ChildStdin,
    answers: BufReader<ChildStderr>,
    _child: Child,
}

struct Answer {
    outcome: Result<(), String>,
    fired: Option<String>,
    counts: Vec<u64>,
}

impl Subject {
    fn start() -> Self {
        let mut command = process::command("subject");
        let mut child = Child::spawn(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
        let (orders, answers) = (child.take_input(), BufReader::new(child.take_errors()));
        Self { orders, answers, _child: child }
    }

    fn tell(&mut self, order: &Order) {
        writeln!(self.orders, "{}", order.to_line()).expect("the subject listens");
    }

    /// The answer, or what is known of a subject that has ended instead.
    fn hear(&mut self) -> Result<Answer, String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let words: Vec<&str> = line.trim_end().split('\t').collect();
        let [outcome, fired, counts] = words[..] else {
            let mut rest = line;
            let _ = std::io::Read::read_to_string(&mut self.answers, &mut rest);
            return Err(rest);
        };
        Ok(Answer {
            outcome: if outcome == "ok" { Ok(()) } else { Err(outcome.to_owned()) },
            fired: (fired != "-").then(|| fired.to_owned()),
            counts: counts.split(' ').map(|count| count.parse().unwrap()).collect(),
        })
    }
}

/// Everything of a walk through all places of a flow.
struct Walk {
    number: usize,
    flow: Flow,
    subject: Subject,
    listener: Listener,
    /// Faults so far, by call: how many there were, and how many were no error for the caller.
    table: BTreeMap<Call, (u64, u64)>,
    places: std::collections::BTreeSet<String>,
    slowest: (Duration, String),
}

impl Walk {
    /// One flow, with both processes; says how it was for the subject.
    fn round(&mut self, plan: Plan) -> Answer {
        let what = format!("{}: {plan:?}", self.flow.name());
        let (flow, began) = (self.flow, Instant::now());
        let name = if flow.subject_dials { self.listener_name() } else { unique("subject") };
        self.subject.tell(&Order { flow: self.number, name: name.clone(), plan });
        let _guard = HangGuard::new(&what);
        let is_over = AtomicBool::new(false);
        let (answer, survived) = std::thread::scope(|scope| {
            let survivor = scope.spawn(|| flow.run_survivor(&self.listener, &name, &is_over));
            let answer = self.subject.hear();
            is_over.store(true, Ordering::Release);
            (answer, survivor.join().expect("the survivor finds nothing wrong"))
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

    /// Lets a call fail; says whether it was made.
    fn fail(&mut self, plan: Plan) -> bool {
        let Plan::Fail { call, .. } = plan else { return false };
        let answer = self.round(plan);
        let Some(place) = answer.fired else { return false };
        self.places.insert(place);
        let row = self.table.entry(call).or_default();
        (row.0, row.1) = (row.0 + 1, row.1 + u64::from(answer.outcome.is_ok()));
        // The next try works.
        self.round(Plan::Count).outcome.unwrap();
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
        let mut walk = Walk {
            number,
            flow,
            subject: Subject::start(),
            listener: flow.listen(&name).unwrap(),
            table: BTreeMap::new(),
            places: std::collections::BTreeSet::new(),
            slowest: (Duration::ZERO, String::new()),
        };
        for _ in 1..WARM_UP {
            walk.round(Plan::Count).outcome.unwrap();
        }
        let counts = walk.round(Plan::Count).counts;
        let before = holdings();
        let is_made = |(call, count): (&Call, u64)| (count > 0).then_some(*call);
        let calls: Vec<Call> = Call::ALL.iter().zip(counts).filter_map(is_made).collect();
        each_failure(&calls, true, |plan| walk.fail(plan));
        until("the survivor has what it had", || {
            // Who has given up before it was accepted is noticed by a look.
            let _ = walk.listener.poll_accept();
            let now = holdings();
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
        places.extend(walk.places);
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
        // As of a process that is about to end; this one does not, as if its first thread alone had ended.
        arm(Plan::Fail { call, nth: 1, error: libc::ESRCH, lasts: false });
        let sides = pair(&Builder::new());
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
        let ended = Err(Error::Unreachable(Some(Denied::Ended)));
        assert!(puts.contains(&ended), "{call:?}: {puts:?}");
        assert!(puts.iter().all(|put| *put == ended || put.is_ok()), "{call:?}: {puts:?}");
    }
}
