//! Checks that need a second process: the access of each process to the other's memory, and small
//! and large messages between them.

use std::time::{Duration, Instant};

use memferry::message::plan::{
    self, AccessMethod, BufferEnds, Locality, MessagePlan, MessageQuery,
};
use memferry::message::{EndpointBuilder, PeerAccess};
use memferry_bench::results::{number, size};

use super::super::echo_peer::{EchoPeer, MAX_MESSAGE_BYTES, PeerAccessReport};
use super::super::{Check, Status};

pub(in super::super) const A_MESSAGE: &str = "a message";
const A_LARGE_MESSAGE: &str = "a large message";
pub(in super::super) const CROSS_MEMORY: &str = "cross-memory access";

/// All checks with a peer process. If no peer can be started, one check with the reason.
pub(super) fn checks() -> Vec<Check> {
    let partner = match EchoPeer::start() {
        Ok(partner) => partner,
        Err(error) => return vec![Check::new(A_MESSAGE, Status::Missing, error)],
    };
    let small = small(round_trip_ns(&partner));
    if small.status == Status::Missing {
        return vec![small];
    }
    let reach = partner.peer_access().and_then(|ours| Ok((ours, partner.peer_access_to_us()?)));
    let plan = reach.as_ref().ok().and_then(|(ours, theirs)| plan_large(ours, theirs));
    vec![cross_memory(reach), small, large(large_ns(&partner), plan)]
}

fn cross_memory(reach: Result<(PeerAccess, PeerAccessReport), String>) -> Check {
    let (ours, theirs) = match reach {
        Ok(reach) => reach,
        Err(error) => {
            return Check::new(CROSS_MEMORY, Status::Warn, format!("cannot be told: {error}"));
        }
    };
    let words = |read, write| match (read, write) {
        (true, true) => "reads and writes",
        (true, false) => "reads, but may not write,",
        (false, _) => "may not look into",
    };
    // The second direction matters more: a parent may access its child where unrelated processes
    // may not access each other.
    let detail = format!(
        "this process {} its child, the child {} this process",
        words(ours.read, ours.write),
        words(theirs.read, theirs.write)
    );
    let denied = theirs.denied.or_else(|| ours.denied.map(|denied| denied.to_string()));
    match denied {
        None => Check::new(CROSS_MEMORY, Status::Ok, detail),
        Some(gate) => {
            let detail = format!("{detail}: large messages are copied twice");
            Check::new(CROSS_MEMORY, Status::Warn, detail).fix(gate)
        }
    }
}

/// The median round-trip time of a small message in ns, and the number of round trips.
fn round_trip_ns(partner: &EchoPeer) -> Result<(f64, usize), String> {
    const MAX_ROUND_TRIPS: usize = 2000;
    const MAX_TIME: Duration = Duration::from_millis(300);
    let mut times = Vec::with_capacity(MAX_ROUND_TRIPS);
    let began = Instant::now();
    while times.len() < MAX_ROUND_TRIPS && (times.is_empty() || began.elapsed() < MAX_TIME) {
        let message = (times.len() as u64).to_le_bytes();
        let mut back = [0; 8];
        let sent = Instant::now();
        partner.echo(&message, &mut back)?;
        times.push(sent.elapsed().as_nanos() as f64);
        if back != message {
            return Err("it came back with wrong bytes".into());
        }
    }
    let count = times.len();
    Ok((median(times), count))
}

fn small(round_trip: Result<(f64, usize), String>) -> Check {
    match round_trip {
        Ok((ns, count)) => {
            let time = number::duration(ns);
            let detail = format!("8 B to a second process and back in {time} (median of {count})");
            Check::new(A_MESSAGE, Status::Ok, detail.clone()).summary(detail)
        }
        Err(error) => Check::new(A_MESSAGE, Status::Missing, error),
    }
}

/// The median round-trip time of a large message in ns. Every byte is compared.
fn large_ns(partner: &EchoPeer) -> Result<f64, String> {
    const ROUNDS: usize = 5;
    let message: Vec<u8> = (0..MAX_MESSAGE_BYTES).map(|at| (at ^ (at >> 8)) as u8).collect();
    let mut back = vec![0; MAX_MESSAGE_BYTES];
    let mut times = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        back.fill(0);
        let sent = Instant::now();
        partner.echo(&message, &mut back)?;
        // The first round touches new memory, so it does not count.
        if round > 0 {
            times.push(sent.elapsed().as_nanos() as f64);
        }
        if back != message {
            return Err("it came back with wrong bytes".into());
        }
    }
    Ok(median(times))
}

/// The median of several times.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn large(took: Result<f64, String>, plan: Option<MessagePlan>) -> Check {
    match took {
        Ok(ns) => {
            let speed = 2.0 * MAX_MESSAGE_BYTES as f64 / ns;
            let mut detail = format!(
                "{} there and back in {}, {} GB/s",
                size::format(MAX_MESSAGE_BYTES as u64),
                number::duration(ns),
                number::short(speed)
            );
            if let Some(plan) = plan {
                detail += &format!("; planned as {}: {}", plan.path.name(), plan.reason);
            }
            Check::new(A_LARGE_MESSAGE, Status::Ok, detail)
        }
        Err(error) => Check::new(A_LARGE_MESSAGE, Status::Missing, error)
            .fix("test the memory of this machine, then report this"),
    }
}

/// The child's plan for the large message, given the access of both processes.
fn plan_large(ours: &PeerAccess, theirs: &PeerAccessReport) -> Option<MessagePlan> {
    let way = |permitted| if permitted { AccessMethod::CrossMemory } else { AccessMethod::None };
    let question = MessageQuery {
        bytes: MAX_MESSAGE_BYTES as u64,
        receiver_access: way(theirs.read),
        sender_access: way(ours.write),
        // Ordinary memory is never offloaded to engines, so spare cores do not matter.
        locality: Locality::SharedCache,
        spare_cores: 0,
        sender_is_busy: false,
        is_ahead: false,
        nonresident: BufferEnds::default(),
    };
    Some(plan::message(&EndpointBuilder::new().plan_context().ok()?, &question, theirs.read))
}

#[cfg(test)]
mod tests {
    use memferry::message::CrossMemoryDenied;

    use super::*;

    fn theirs(read: bool, write: bool, denied: Option<&str>) -> PeerAccessReport {
        PeerAccessReport { read, write, denied: denied.map(str::to_owned) }
    }

    #[test]
    fn full_reach_in_both_directions_is_well() {
        let ours = PeerAccess { read: true, write: true, denied: None };
        let check = cross_memory(Ok((ours, theirs(true, true, None))));
        assert_eq!((check.status, check.fix), (Status::Ok, None));
    }

    #[test]
    fn the_gate_is_named_even_if_only_the_child_meets_it() {
        let ours = PeerAccess { read: true, write: true, denied: None };
        let gate = CrossMemoryDenied::PtraceScope(1).to_string();
        let check = cross_memory(Ok((ours, theirs(false, false, Some(&gate)))));
        assert_eq!(check.status, Status::Warn);
        assert!(check.detail.contains("the child may not look into"), "{}", check.detail);
        assert!(check.fix.unwrap().contains("sysctl kernel.yama.ptrace_scope=0"));
    }

    #[test]
    fn messages_that_do_not_arrive_are_missing() {
        let check = small(Err("the peer is gone".into()));
        assert_eq!((check.name, check.status), (A_MESSAGE, Status::Missing));
        assert_eq!(large(Err("wrong".into()), None).status, Status::Missing);
    }

    #[test]
    fn the_path_of_the_large_message_follows_from_the_reach() {
        let yes = PeerAccess { read: true, write: true, denied: None };
        let path = |ours, theirs| plan_large(&ours, &theirs).map(|plan| plan.path.name());
        assert_eq!(path(yes, theirs(true, true, None)), Some("cooperative"));
        assert_eq!(path(yes, theirs(false, false, None)), Some("pipeline"));
        let reads = PeerAccess { write: false, ..yes };
        assert_eq!(path(reads, theirs(true, true, None)), Some("single"));
    }
}
