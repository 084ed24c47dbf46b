//! `receive-overhead`: the time that receiving takes from computing, for a process that works on a
//! stream of tasks (figure 1 of the paper on a self-connected network card as copy engine).

use crate::Progress;
use crate::group::{BenchEnvironment, GroupTask, PACKETS, RECEIVE_AHEAD, RECEIVE_NAIVE};
use crate::harness::{Budget, Sample, Samples};
use crate::harness::{median, min_or_nan, set};
use crate::results::outcome::Outcome;
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "receive-overhead",
    "What receiving takes away from computing, with receives begun ahead or in the background",
    run,
);

/// Size of the summary keys: one of the long messages for which the paper states its reductions,
/// and small enough for the cache of a core.
const REFERENCE_BYTES: u64 = 1 << 20;
/// Minimum size of the messages of which the keys have the worst: what a shorter one loses is small
/// beside the difference between two runs.
const MIN_WORST_BYTES: u64 = 16 << 10;

/// A figure, whether its memory is cold, the key of messages at the reference size, and the key of
/// packets.
struct Temperature {
    figure: &'static str,
    cold: bool,
    reduction: &'static str,
    packets_gain: &'static str,
}

const TEMPERATURES: [Temperature; 2] = [
    Temperature {
        figure: "hot",
        cold: false,
        reduction: "overhead_reduction_hot",
        packets_gain: "packets_hot_worst_gain",
    },
    Temperature {
        figure: "cold",
        cold: true,
        reduction: "overhead_reduction",
        packets_gain: "packets_cold_worst_gain",
    },
];

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let sizes = sizes(effort);
    progress.start((2 * TEMPERATURES.len() * sizes.len()) as u64 + 1, &outcome.bench);
    progress.step("starting the processes");
    let mut camp = BenchEnvironment::in_process()?;
    let cores = camp.cores();
    let mut field = camp.receiver_candidates();
    let mut reductions = Vec::new();
    for Temperature { figure, cold, reduction: key, .. } in TEMPERATURES {
        for &bytes in &sizes {
            progress.step(&format!("{figure} {}", size::format(bytes)));
            let task = GroupTask::Receive { bytes, cold };
            let rounds = field.interleave(task, budget(effort), |_| true);
            let lost = format!("{figure}: compute time lost per message");
            outcome.rows.extend(rounds.rows(&lost, bytes, "ns", lost_ns));
            let used = format!("{figure}: processor time per message beside computing");
            outcome.rows.extend(rounds.rows(&used, bytes, "ns", |timing| timing.cpu_ns));
            if bytes == REFERENCE_BYTES {
                set(&mut outcome.summary, key, reduction(&rounds));
            }
            if bytes >= MIN_WORST_BYTES {
                reductions.push(reduction(&rounds));
            }
        }
    }
    set(&mut outcome.summary, "overhead_worst_reduction", min_or_nan(reductions));
    drop(field);
    let mut field = camp.packet_candidates();
    for Temperature { figure: temperature, cold, packets_gain: key, .. } in TEMPERATURES {
        let mut gains = Vec::new();
        for &bytes in &sizes {
            progress.step(&format!("packets, {temperature} {}", size::format(bytes)));
            let task = GroupTask::Receive { bytes, cold };
            let rounds = field.interleave(task, budget(effort), |_| true);
            let lost = format!("packets, {temperature}: compute time lost per message");
            outcome.rows.extend(rounds.rows(&lost, bytes, "ns", lost_ns));
            if bytes == REFERENCE_BYTES {
                outcome.notes.extend(packets_note(temperature, &rounds));
            }
            if bytes >= MIN_WORST_BYTES {
                gains.push(packets_gain(&rounds));
            }
        }
        set(&mut outcome.summary, key, min_or_nan(gains));
    }
    drop(field);
    camp.finish(&mut outcome);
    outcome.notes.splice(0..0, notes(cores));
    Ok(outcome)
}

fn notes(cores: usize) -> Vec<String> {
    let shares = if cores > 2 {
        "a core of its own"
    } else {
        "the sender's core, because there is no other: what it copies there, the sender cannot"
    };
    let others = if cores > 1 { "other cores" } else { "the receiver's core" };
    vec![
        "A task is a message that is read whole, and a computation several times as long as a copy \
         of it. Lost is the time of the loop less that of the same computation on a message in the \
         cache, without receiving. The sender always has eight tasks on their way. Hot are three \
         places on each side; cold ones are spread over 256 MiB on each side."
            .into(),
        "naive: recv, compute. Two phases: irecv of the next, wait, compute. Three phases: irecv of \
         the one after the next, progress, wait, compute. Background: two phases, while a thread of \
         the endpoint moves messages. Large messages are copied by whoever has time, and once a \
         receive has begun that is the sender, too; its processor time is not counted, that of all \
         threads of the receiver is."
            .into(),
        format!("The receiver computes on a core of its own; its background thread has {shares}."),
        format!(
            "Reductions are those of the best form at {}, by the medians of rounds. With its network \
             card the paper lost 31 % less hot and 42 % less cold than with memcpy, both in three \
             phases.",
            size::format(REFERENCE_BYTES)
        ),
        format!(
            "Packets: a message lies in a ring of buffers of 2 KiB, with 1460 bytes in each, and goes to \
             the user's memory: by memcpy packet by packet, or by one ideliver for all packets of the \
             next message, with a variable that is looked at before the next task. The paper compared \
             these two with its card as the engine; here it is the one that a ferry has, with room for \
             2048 packets, on {others}. The ring is filled before the clock starts and not again: hot \
             packets stay in the cache of the receiver's core, which helps memcpy. With MEMFERRY_NIC it is \
             the network card that delivers, alone."
        ),
    ]
}

/// Note about how much less overhead a delivery has than memcpy; `None` if it was not measured.
fn packets_note(temperature: &str, rounds: &Samples) -> Option<String> {
    let [copied, delivered] = packets_lost(rounds);
    let saved = share_saved(delivered, copied);
    let (bytes, share) = (size::format(REFERENCE_BYTES), 100.0 * saved.abs());
    let word = if saved < 0.0 { "more" } else { "less" };
    let text =
        || format!("Packets, {temperature}: {share:.0} % {word} lost than by memcpy at {bytes}.");
    saved.is_finite().then(text)
}

/// The compute time that a message in packets takes, by memcpy and by a delivery: the medians of rounds,
/// as in the rows. NaN if it was not measured.
fn packets_lost(rounds: &Samples) -> [f64; 2] {
    PACKETS.map(|series| median(rounds.values(series, lost_ns)))
}

/// How many times less compute time a delivery takes than memcpy; infinite if it takes none, NaN if one
/// of both was not measured.
fn packets_gain(rounds: &Samples) -> f64 {
    let [copied, delivered] = packets_lost(rounds);
    gain(copied, delivered)
}

fn gain(copied_ns: f64, delivered_ns: f64) -> f64 {
    let measured = copied_ns > 0.0 && delivered_ns.is_finite();
    if measured { copied_ns / delivered_ns.max(0.0) } else { f64::NAN }
}

fn sizes(effort: Effort) -> Vec<u64> {
    match effort {
        Effort::Brief => vec![64 << 10, REFERENCE_BYTES],
        Effort::Quick => vec![4 << 10, 64 << 10, REFERENCE_BYTES],
        Effort::Full => (12..=22).map(|shift| 1 << shift).collect(),
    }
}

/// Many short measurements: the overhead is a small difference of large times, so it needs
/// measurements without disturbance.
fn budget(effort: Effort) -> Budget {
    match effort {
        Effort::Brief => Budget::each(11, 4, 500),
        Effort::Quick => Budget::each(21, 5, 1000),
        Effort::Full => Budget::each(31, 10, 4000),
    }
}

fn lost_ns(timing: &Sample) -> f64 {
    timing.messages_ns
}

/// Returns by how much the best receive loop reduces the overhead of the naive one, from the
/// medians of all rounds: the overhead of a single round is a small difference of large times, too
/// uncertain as a divisor. The result is at most 1; a larger value would be noise.
fn reduction(rounds: &Samples) -> f64 {
    let lost = |series: &str| median(rounds.values(series, lost_ns));
    let best = RECEIVE_AHEAD.map(lost).into_iter().fold(f64::NAN, f64::min);
    share_saved(best, lost(RECEIVE_NAIVE))
}

fn share_saved(best_ns: f64, naive_ns: f64) -> f64 {
    let measured = naive_ns > 0.0 && best_ns.is_finite();
    if measured { 1.0 - best_ns.max(0.0) / naive_ns } else { f64::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::outcome::Summary;

    #[test]
    fn every_effort_measures_what_the_keys_need() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            assert!(sizes(effort).contains(&REFERENCE_BYTES), "{effort:?}");
            assert!(sizes(effort).iter().any(|&bytes| bytes >= MIN_WORST_BYTES), "{effort:?}");
        }
    }

    #[test]
    fn a_reduction_is_what_is_left_of_the_naive_loss() {
        assert_eq!(share_saved(25.0, 100.0), 0.75);
        assert_eq!(share_saved(150.0, 100.0), -0.5);
        assert_eq!(share_saved(-10.0, 100.0), 1.0);
        assert!(share_saved(10.0, -100.0).is_nan());
        assert!(share_saved(f64::NAN, 100.0).is_nan());
        // Without samples.
        assert!(reduction(&Samples::default()).is_nan());
    }

    #[test]
    fn a_gain_is_the_loss_by_memcpy_for_each_of_the_delivery() {
        assert_eq!(gain(100.0, 50.0), 2.0);
        assert_eq!(gain(100.0, 125.0), 0.8);
        assert_eq!(gain(100.0, -5.0), f64::INFINITY);
        assert!(gain(-1.0, 50.0).is_nan());
        assert!(gain(100.0, f64::NAN).is_nan());
    }

    #[test]
    fn the_worst_size_makes_the_key_and_a_missing_series_leaves_it_out() {
        let mut summary = Summary::default();
        set(&mut summary, "some", min_or_nan([gain(3.0, 2.0), gain(4.0, 5.0), gain(1.0, 0.0)]));
        assert_eq!(summary.get("some"), Some(0.8));
        set(&mut summary, "none", min_or_nan([gain(3.0, 2.0), packets_gain(&Samples::default())]));
        assert_eq!(summary.get("none"), None);
    }

    #[test]
    fn nothing_is_said_of_packets_that_were_not_measured() {
        assert_eq!(packets_note("hot", &Samples::default()), None);
    }

    #[test]
    fn the_notes_say_who_shares_a_core() {
        assert!(notes(2).concat().contains("the sender's core"));
        assert!(!notes(8).concat().contains("the sender's core"));
    }
}
