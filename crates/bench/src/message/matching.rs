//! `matching`: what a message costs when many messages or many receives wait: in order, in reverse
//! order, scattered, with wildcards, against the MPIs of this machine.

use std::fmt;
use std::time::Instant;

use anyhow::ensure;
use memferry::message::{Endpoint, Error, Peer, Source, TAG_ALL, TAG_ANY};

use crate::Progress;
use crate::group::{BenchEnvironment, GroupTask};
use crate::harness::{Budget, Sample, set, warm_up_iterations};
use crate::results::outcome::Outcome;
use crate::results::series::{MEMFERRY, MPICH, OPEN_MPI};
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "matching",
    "Messages with many others waiting: posted or unexpected, in any order, against MPI",
    run,
);

/// What waits, and in which order it is matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatchCase {
    /// Receives are posted, and their messages come in the same order.
    Posted,
    /// Their messages come in reverse order.
    PostedReverse,
    /// Their messages come scattered, and every other receive takes any sender.
    PostedMixed,
    /// Messages have arrived, and are received in the same order.
    Unexpected,
    /// They are received in reverse order.
    UnexpectedReverse,
    /// They are received scattered, and every other receive takes any sender.
    UnexpectedMixed,
    /// They are received by any sender and any tag.
    UnexpectedAny,
}

impl MatchCase {
    pub(crate) const ALL: [Self; 7] = [
        Self::Posted,
        Self::PostedReverse,
        Self::PostedMixed,
        Self::Unexpected,
        Self::UnexpectedReverse,
        Self::UnexpectedMixed,
        Self::UnexpectedAny,
    ];

    /// The word in commands of groups, and the name of the figure.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Posted => "posted",
            Self::PostedReverse => "posted-reverse",
            Self::PostedMixed => "posted-mixed",
            Self::Unexpected => "unexpected",
            Self::UnexpectedReverse => "unexpected-reverse",
            Self::UnexpectedMixed => "unexpected-mixed",
            Self::UnexpectedAny => "unexpected-any",
        }
    }

    /// The case of a word.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|case| case.word() == word)
    }

    fn is_posted(self) -> bool {
        matches!(self, Self::Posted | Self::PostedReverse | Self::PostedMixed)
    }

    fn is_mixed(self) -> bool {
        matches!(self, Self::PostedMixed | Self::UnexpectedMixed)
    }

    /// The tag that is matched at a place of the order. Tags are from 1 on.
    fn tag_at(self, place: u64, depth: u64) -> u64 {
        1 + match self {
            Self::PostedReverse | Self::UnexpectedReverse => depth - 1 - place,
            // A prime that divides none of the depths.
            Self::PostedMixed | Self::UnexpectedMixed => place * 7919 % depth,
            _ => place,
        }
    }
}

impl fmt::Display for MatchCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The depth of the keys.
const REFERENCE_DEPTH: u64 = 10_000;
/// The largest depth of peers: some of them need a time that grows with its square.
const MAX_PEER_DEPTH: u64 = 10_000;
/// The largest depth, for the limits of members.
pub(crate) const MAX_DEPTH: u64 = 100_000;
/// Tag of the message after which all others have arrived, and of replies.
const MARK: u64 = 0;

fn depths(effort: Effort) -> &'static [u64] {
    match effort {
        Effort::Full => &[1, 10, 100, 1000, REFERENCE_DEPTH, MAX_DEPTH],
        Effort::Brief | Effort::Quick => &[1, 100, REFERENCE_DEPTH],
    }
}

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let depths = depths(effort);
    progress.start((MatchCase::ALL.len() * depths.len()) as u64 + 2, &outcome.bench);
    progress.step("compiling the peers");
    let mut camp = BenchEnvironment::discover()?;
    progress.step("starting the groups");
    let mut field = camp.pair_candidates();
    let (mut growth, mut against) = (f64::NEG_INFINITY, f64::INFINITY);
    for case in MatchCase::ALL {
        let mut alone = f64::NAN;
        for &depth in depths {
            progress.step(&format!("{case}, {depth} deep"));
            let takes_part = |series: &str| match series {
                MEMFERRY => true,
                OPEN_MPI | MPICH => depth <= MAX_PEER_DEPTH,
                _ => false,
            };
            let task = GroupTask::Matching { depth, case };
            let rounds = field.interleave(task, Budget::of_groups(effort), takes_part);
            let each = |sample: &Sample| sample.total_ns / depth as f64;
            outcome.rows.extend(rounds.rows(case.word(), depth, "ns", each));
            let ours = rounds.median_ns(MEMFERRY) / depth as f64;
            if depth == 1 {
                alone = ours;
            }
            if depth == REFERENCE_DEPTH {
                growth = growth.max(ours / alone);
                against = against.min(rounds.ratio_to_best_peer(MEMFERRY));
            }
        }
    }
    drop(field);
    set(&mut outcome.summary, "depth_10k_vs_depth_1", growth);
    set(&mut outcome.summary, "depth_10k_vs_best", against);
    camp.finish(&mut outcome);
    outcome.notes.push(
        "Time for each of many messages of 8 bytes. Posted: all receives are posted before the first \
         message is sent, and the time ends with the last of them. Unexpected: all messages have \
         arrived before the first receive, and only the receives are timed. Rows are by the number \
         of receives or messages that wait. The keys are those of the worst of all seven cases. Memferry's \
         limits of waiting messages and of operations are raised for the largest depth."
            .into(),
    );
    Ok(outcome)
}

/// The part of a member: the first receives, the second sends.
pub(crate) fn match_messages(
    endpoint: &Endpoint,
    peer: Peer,
    is_receiver: bool,
    (case, depth): (MatchCase, u64),
    iterations: u64,
) -> anyhow::Result<Sample> {
    let mut timed_ns = 0;
    for turn in 0..warm_up_iterations(iterations) + iterations {
        let ns = match (is_receiver, case.is_posted()) {
            (true, true) => receive_posted(endpoint, peer, case, depth)?,
            (true, false) => receive_unexpected(endpoint, peer, case, depth)?,
            (false, _) => send_all(endpoint, peer, case, depth)?,
        };
        timed_ns += if turn < warm_up_iterations(iterations) { 0 } else { ns };
    }
    Ok(Sample::of_messages(timed_ns as f64))
}

/// The sender that a receive names.
fn source_of(case: MatchCase, peer: Peer, tag: u64) -> Source {
    if case.is_mixed() && tag.is_multiple_of(2) { Source::Any } else { peer.into() }
}

fn receive_posted(
    endpoint: &Endpoint,
    peer: Peer,
    case: MatchCase,
    depth: u64,
) -> anyhow::Result<u128> {
    let mut bytes = vec![0u8; 8 * depth as usize];
    let ns = endpoint.scope(|scope| {
        let mut receives = Vec::with_capacity(depth as usize);
        for (place, tag) in bytes.chunks_exact_mut(8).zip(1..) {
            receives.push(scope.irecv(source_of(case, peer, tag), tag, TAG_ALL, place)?);
        }
        endpoint.send(peer, MARK, &[])?;
        let begin = Instant::now();
        for receive in &mut receives {
            receive.wait()?;
        }
        Ok::<_, Error>(begin.elapsed().as_nanos())
    })?;
    let is_right = |(word, tag): (&[u8], u64)| word == tag.to_le_bytes();
    ensure!(bytes.chunks_exact(8).zip(1..).all(is_right), "a message went to another receive");
    Ok(ns)
}

fn receive_unexpected(
    endpoint: &Endpoint,
    peer: Peer,
    case: MatchCase,
    depth: u64,
) -> anyhow::Result<u128> {
    endpoint.recv(peer, MARK, TAG_ALL, &mut [])?;
    let (mut word, mut right) = ([0; 8], true);
    let begin = Instant::now();
    for place in 0..depth {
        let tag = case.tag_at(place, depth);
        let mask = if case == MatchCase::UnexpectedAny { TAG_ANY } else { TAG_ALL };
        let from = if mask == TAG_ANY { Source::Any } else { source_of(case, peer, tag) };
        endpoint.recv(from, tag, mask, &mut word)?;
        right &= word == tag.to_le_bytes();
    }
    let ns = begin.elapsed().as_nanos();
    ensure!(right, "a receive got another message");
    endpoint.send(peer, MARK, &[])?;
    Ok(ns)
}

fn send_all(endpoint: &Endpoint, peer: Peer, case: MatchCase, depth: u64) -> anyhow::Result<u128> {
    let posted = case.is_posted();
    if posted {
        endpoint.recv(peer, MARK, TAG_ALL, &mut [])?;
    }
    for place in 0..depth {
        let tag = if posted { case.tag_at(place, depth) } else { place + 1 };
        endpoint.send(peer, tag, &tag.to_le_bytes())?;
    }
    if !posted {
        endpoint.send(peer, MARK, &[])?;
        endpoint.recv(peer, MARK, TAG_ALL, &mut [])?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_is_matched_once_in_every_order_of_every_depth() {
        for case in MatchCase::ALL {
            for &depth in depths(Effort::Full) {
                let mut seen = vec![false; depth as usize];
                for place in 0..depth {
                    let tag = case.tag_at(place, depth) as usize;
                    assert!(!std::mem::replace(&mut seen[tag - 1], true), "{case} {depth}");
                }
            }
        }
    }

    #[test]
    fn two_members_match_their_messages_in_every_case() {
        let name = |side: &str| format!("bench-matching-{side}-{}", std::process::id());
        let (here, there) = (name("here"), name("there"));
        let receiver = Endpoint::open(&here).unwrap();
        let sender = Endpoint::open(&there).unwrap();
        let to_receiver = sender.connect(&here).unwrap();
        let to_sender = receiver.connect(&there).unwrap();
        for case in MatchCase::ALL {
            for depth in [1, 100] {
                let task = (case, depth);
                std::thread::scope(|scope| {
                    scope.spawn(|| match_messages(&sender, to_receiver, false, task, 2).unwrap());
                    match_messages(&receiver, to_sender, true, task, 2).unwrap();
                });
            }
        }
    }
}
