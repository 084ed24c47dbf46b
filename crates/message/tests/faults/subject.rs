//! The process in which faults are injected.

use std::io::{BufRead, Write};

use memferry_sys::fault::{self, Call, FaultCounts, FaultPlan};

use crate::flows::Flow;
use memferry_testing::message::process::setting;
use memferry_testing::message::traces::resource_usage;
use memferry_testing::message::until;

/// Flows without a fault that come first, so that objects that are created once exist.
pub(crate) const WARMUP_ROUNDS: usize = 4;

/// A command to the subject, in one line.
pub(crate) struct SubjectCommand {
    pub(crate) flow: usize,
    pub(crate) name: String,
    pub(crate) plan: FaultPlan,
}

impl SubjectCommand {
    pub(crate) fn to_line(&self) -> String {
        let number = |call: Call| Call::ALL.iter().position(|&other| other == call).unwrap();
        let plan = match self.plan {
            FaultPlan::Count => "count 0 0 0".to_owned(),
            FaultPlan::Fail { call, nth, error, is_persistent: lasts } => {
                let word = if lasts { "from" } else { "fail" };
                format!("{word} {} {nth} {error}", number(call))
            }
            FaultPlan::Kill { nth } => format!("die 0 {nth} 0"),
            FaultPlan::Hold { .. } => panic!("a subject is not held"),
        };
        format!("{} {} {plan}", self.flow, self.name)
    }

    fn from_line(line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [flow, name, plan, call, nth, error] = words[..] else { panic!("an order: {line}") };
        let (nth, error) = (nth.parse().unwrap(), error.parse().unwrap());
        let call = Call::ALL[call.parse::<usize>().unwrap()];
        let plan = match plan {
            "fail" | "from" => FaultPlan::Fail { call, nth, error, is_persistent: plan == "from" },
            "die" => FaultPlan::Kill { nth },
            _ => FaultPlan::Count,
        };
        Self { flow: flow.parse().unwrap(), name: name.to_owned(), plan }
    }
}

/// Runs a flow, with the fault of the command. Returns the result and the counts.
fn walk(order: &SubjectCommand) -> (Result<(), String>, FaultCounts) {
    let flow = Flow::all()[order.flow];
    fault::arm(order.plan);
    // Everything is closed and dropped when it returns.
    let can_accept = !matches!(order.plan, FaultPlan::Fail { is_persistent: true, .. });
    let outcome = flow.run_subject(&order.name, can_accept);
    let account = fault::disarm();
    (outcome.map_err(|error| error.to_string()), account)
}

/// The number of threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// Runs one flow after another, on command; replies to each with a line: the result, the place of
/// the fault, and the number of each call.
pub(crate) fn serve() {
    let (orders, mut answers) = (std::io::stdin().lock(), std::io::stderr());
    let mut max = [0; 3];
    for (number, order) in orders.lines().enumerate() {
        let order = SubjectCommand::from_line(&order.unwrap());
        let (outcome, account) = walk(&order);
        let held = || {
            let now = resource_usage();
            [now.descriptors, now.mappings, threads()]
        };
        if number < WARMUP_ROUNDS {
            max = std::array::from_fn(|index| max[index].max(held()[index]));
        } else {
            until("nothing is left of a flow", || {
                held().iter().zip(max).all(|(now, max)| *now <= max)
            });
        }
        let outcome =
            outcome.map_or_else(|error| error.replace(['\t', '\n'], " "), |()| "ok".into());
        let fired = account.fired_at.map_or("-".to_owned(), ToString::to_string);
        let counts: Vec<String> = Call::ALL
            .iter()
            .map(|call| account.calls.get(call).unwrap_or(&0).to_string())
            .collect();
        writeln!(answers, "{outcome}\t{fired}\t{}", counts.join(" ")).unwrap();
    }
}

/// Runs a flow once: for a process that does not see its end.
pub(crate) fn walk_once() {
    let (outcome, _) = walk(&SubjectCommand::from_line(&setting("MEMFERRY_TEST_ORDER")));
    outcome.unwrap();
}
