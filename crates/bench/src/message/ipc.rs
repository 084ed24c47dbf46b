//! `ipc`: messages over a Memferry link, against other methods to send data from one process to
//! another (figure 9 of the paper on asynchronous memory operations): the time of one message, and
//! the bandwidth of many.

use crate::Progress;
use crate::group::{BenchEnvironment, CROSS_MEMORY, GroupTask, LOOPBACK, TWO_COPIES};
use crate::harness::set;
use crate::harness::{Budget, Sample, Samples};
use crate::message::stream::window_messages;
use crate::results::outcome::{Outcome, Summary};
use crate::results::series::MEMFERRY;
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "ipc",
    "Messages between two processes, against one-sided copies, shared memory, TCP and pipes",
    run,
);

/// The size of the comparison in the paper.
const REFERENCE_BYTES: u64 = 4 << 20;
/// Summary keys, and the peer of each.
const KEYS: [(&str, &str); 3] =
    [("4m_vs_cma", CROSS_MEMORY), ("4m_vs_shm", TWO_COPIES), ("4m_vs_loopback", LOOPBACK)];

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let sizes = sizes(effort);
    progress.start(2 * sizes.len() as u64 + 1, &outcome.bench);
    progress.step("starting the processes");
    let mut camp = BenchEnvironment::in_process()?;
    let mut field = camp.transport_candidates();
    let patience = Budget::of_groups(effort);
    for bytes in sizes {
        progress.step(&format!("latency, {}", size::format(bytes)));
        let rounds = field.interleave(GroupTask::Pingpong { bytes }, patience, |_| true);
        let half = |timing: &Sample| timing.total_ns / 2.0;
        outcome.rows.extend(rounds.rows("latency", bytes, "ns", half));
        if bytes == REFERENCE_BYTES {
            add_keys(&mut outcome.summary, &rounds);
        }
        progress.step(&format!("bandwidth, {}", size::format(bytes)));
        let rounds = field.interleave(GroupTask::Stream { bytes }, patience, |_| true);
        let moved = (bytes * window_messages(bytes)) as f64;
        let bandwidth = |timing: &Sample| moved / timing.total_ns;
        outcome.rows.extend(rounds.rows("bandwidth", bytes, "GB/s", bandwidth));
    }
    drop(field);
    camp.finish(&mut outcome);
    outcome.notes.push(format!(
        "Two processes, each bound to a core of its own; data goes from ordinary memory of the \
         one to ordinary memory of the other, always the same, and is checked before it is \
         timed. Latency is half of a round trip, for the keys too. Bandwidth is that of a window \
         of messages one way, {} of them up to 256 KiB and {} at 4 MiB, with one answer at the \
         end.",
        window_messages(1 << 10),
        window_messages(REFERENCE_BYTES)
    ));
    outcome.notes.push(
        "The cross-memory read is one process_vm_readv by the receiver, told of by a line in \
         shared memory. Two copies are pipelined through a ring that stays in the caches. Both \
         look for the other without sleeping, as ours does for a while. Loopback TCP is without \
         delay, its buffers are the kernel's; Unix sockets have buffers of 1 MiB, pipes are as \
         large as the kernel lets users make them, and the calls of all three block."
            .into(),
    );
    outcome.notes.push(
        "In the paper a message of 4 MB took 1.96 times as long through memory mapped by the \
         kernel, and 4.85 times as long through the loopback of a network card, as with its copy \
         engine."
            .into(),
    );
    Ok(outcome)
}

fn sizes(effort: Effort) -> Vec<u64> {
    match effort {
        Effort::Brief => vec![4 << 10, 64 << 10, 1 << 20, REFERENCE_BYTES],
        Effort::Quick => (10..=22).step_by(2).chain([26]).map(|shift| 1 << shift).collect(),
        Effort::Full => (10..=26).map(|shift| 1 << shift).collect(),
    }
}

fn add_keys(summary: &mut Summary, rounds: &Samples) {
    for (key, peer) in KEYS {
        set(summary, key, rounds.ratio(MEMFERRY, peer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            assert!(sizes(effort).contains(&REFERENCE_BYTES), "{effort:?}");
            let largest = sizes(effort).into_iter().max();
            assert!(effort == Effort::Brief || largest == Some(64 << 20), "{effort:?}");
        }
    }
}
