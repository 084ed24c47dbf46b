//! The process to which something happens.

use std::io::{BufRead, Write};

use memferry_sys::fault::{self, Account, Call, Plan};

use crate::flows::Flow;
use crate::support::process::setting;
use crate::support::traces::holdings;
use crate::support::until;

/// Flows without a fault that come first: what is made once and stays is there after them.
pub(crate) const WARM_UP: usize = 4;

/// What is said to the subject, in a line.
pub(crate) struct Order {
    pub(crate) flow: usize,
    pub(crate) name: String,
    pub(crate) plan: Plan,
}

impl Order {
    pub(crate) fn to_line(&self) -> String {
        let number = |call: Call| Call::ALL.iter().position(|&other| other == call).unwrap();
        let plan = match self.plan {
            Plan::Count => "count 0 0 0".to_owned(),
            Plan::Fail { call, nth, error, lasts } => {
                let word = if lasts { "from" } else { "fail" };
                format!("{word} {} {nth} {error}", number(call))
            }
            Plan::Die { nth } => format!("die 0 {nth} 0"),
        };
        format!("{} {} {plan}", self.flow, self.name)
    }

    fn from_line(line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [flow, name, plan, call, nth, error] = words[..] else { panic!("an order: {line}") };
        let (nth, error) = (nth.parse().unwrap(), error.parse().unwrap());
        let call = Call::ALL[call.parse::<usize>().unwrap()];
        let plan = match plan {
            "fail" | "from" => Plan::Fail { call, nth, error, lasts: plan == "from" },
            "die" => Plan::Die { nth },
            _ => Plan::Count,
        };
        Self { flow: flow.parse().unwrap(), name: name.to_owned(), plan }
    }
}

/// Walks a flow, with what the order says going wrong. Returns how it ended and what was counted.
fn walk(order: &Order) -> (Result<(), String>, Account) {
    let flow = Flow::all()[order.flow];
    fault::arm(order.plan);
    // Everything is closed and dropped when it returns.
    let can_accept = !matches!(order.plan, Plan::Fail { lasts: true, .. });
    let outcome = flow.run_subject(&order.name, can_accept);
    let account = fault::disarm();
    (outcome.map_err(|error| error.to_string()), account)
}

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// Walks one flow after another, as it is told; answers each order with a line: how it ended, where the
/// fault was, and how often each call was made.
pub(crate) fn serve() {
    let (orders, mut answers) = (std::io::stdin().lock(), std::io::stderr());
    let mut most = [0; 3];
    for (number, order) in orders.lines().enumerate() {
        let order = Order::from_line(&order.unwrap());
        let (outcome, account) = walk(&order);
        let held = || {
            let now = holdings();
            [now.descriptors, now.mappings, threads()]
        };
        if number < WARM_UP {
            most = std::array::from_fn(|index| most[index].max(held()[index]));
        } else {
            until("nothing is left of a flow", || {
                held().iter().zip(most).all(|(now, most)| *now <= most)
            });
        }
        let outcome =
            outcome.map_or_else(|error| error.replace(['\t', '\n'], " "), |()| "ok".into());
        let fired = account.fired.map_or("-".to_owned(), ToString::to_string);
        let counts: Vec<String> = Call::ALL
            .iter()
            .map(|call| account.calls.get(call).unwrap_or(&0).to_string())
            .collect();
        writeln!(answers, "{outcome}\t{fired}\t{}", counts.join(" ")).unwrap();
    }
}

/// Walks a flow once: for a process that does not see the end of it.
pub(crate) fn walk_once() {
    let (outcome, _) = walk(&Order::from_line(&setting("MEMFERRY_TEST_ORDER")));
    outcome.unwrap();
}
