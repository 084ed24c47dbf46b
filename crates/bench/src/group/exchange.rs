//! Exchange of messages from each member to each member, as distributed programs need it. Sums and
//! gathers over all members are built on it here.

use super::plain::{Plain, bytes_of, bytes_of_mut};

/// Connection of one member to all others.
pub(crate) trait Exchange {
    /// Rank of this member.
    fn rank(&self) -> usize;

    /// Number of members.
    fn size(&self) -> usize;

    /// Sends `sent[rank]` to every member and receives `received[rank]` from it, including this
    /// member's own part. Both members of a pair use the same length.
    fn exchange(&mut self, sent: &[&[u8]], received: &mut [&mut [u8]]) -> anyhow::Result<()>;
}

/// Sends the same values to all members and receives theirs, in the order of their ranks.
pub(crate) fn gather_all<T: Plain>(
    members: &mut impl Exchange,
    own: &[T],
    all: &mut [T],
) -> anyhow::Result<()> {
    assert_eq!(all.len(), own.len() * members.size());
    let sent = vec![bytes_of(own); members.size()];
    let mut received: Vec<_> = all.chunks_exact_mut(own.len()).map(bytes_of_mut).collect();
    members.exchange(&sent, &mut received)
}

/// Adds the values of all members element by element. `all` is a buffer for the values of all
/// members.
pub(crate) fn sum_all<T: Plain + std::ops::AddAssign>(
    members: &mut impl Exchange,
    own: &[T],
    all: &mut [T],
    sums: &mut [T],
) -> anyhow::Result<()> {
    gather_all(members, own, all)?;
    let (first, others) = all.split_at(own.len());
    sums.copy_from_slice(first);
    for other in others.chunks_exact(own.len()) {
        for (sum, &value) in sums.iter_mut().zip(other) {
            *sum += value;
        }
    }
    Ok(())
}

/// Sends and receives blocks of one length, one for each member, contiguous in memory.
pub(crate) fn exchange_blocks<T: Plain>(
    members: &mut impl Exchange,
    sent: &[T],
    received: &mut [T],
) -> anyhow::Result<()> {
    let block = sent.len() / members.size();
    let lengths = vec![block; members.size()];
    exchange_parts(members, (sent, &lengths), (received, &lengths))
}

/// Sends and receives blocks of given lengths, one for each member, contiguous in memory.
pub(crate) fn exchange_parts<T: Plain>(
    members: &mut impl Exchange,
    (mut sent, sent_lengths): (&[T], &[usize]),
    (mut received, received_lengths): (&mut [T], &[usize]),
) -> anyhow::Result<()> {
    let mut parts = Vec::with_capacity(sent_lengths.len());
    for &length in sent_lengths {
        let (part, rest) = sent.split_at(length);
        parts.push(bytes_of(part));
        sent = rest;
    }
    let mut places = Vec::with_capacity(received_lengths.len());
    for &length in received_lengths {
        let (place, rest) = received.split_at_mut(length);
        places.push(bytes_of_mut(place));
        received = rest;
    }
    members.exchange(&parts, &mut places)
}

/// Returns whether `yes` is true at every member.
pub(crate) fn all_agree(members: &mut impl Exchange, yes: bool) -> anyhow::Result<bool> {
    let mut all = vec![0u32; members.size()];
    gather_all(members, &[u32::from(yes)], &mut all)?;
    Ok(all.iter().all(|&answer| answer == 1))
}

/// Members that are threads of one process, for tests.
#[cfg(test)]
pub(crate) mod threads {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::Exchange;

    pub(crate) struct ExchangeThread {
        rank: usize,
        to: Vec<Sender<Vec<u8>>>,
        from: Vec<Receiver<Vec<u8>>>,
    }

    impl Exchange for ExchangeThread {
        fn rank(&self) -> usize {
            self.rank
        }

        fn size(&self) -> usize {
            self.to.len()
        }

        fn exchange(&mut self, sent: &[&[u8]], received: &mut [&mut [u8]]) -> anyhow::Result<()> {
            for (to, part) in self.to.iter().zip(sent) {
                to.send(part.to_vec())?;
            }
            for (from, place) in self.from.iter().zip(received) {
                place.copy_from_slice(&from.recv()?);
            }
            Ok(())
        }
    }

    /// Runs a closure on `size` threads that can exchange messages.
    pub(crate) fn run_members(size: usize, run: impl Fn(ExchangeThread) + Sync) {
        let mut members: Vec<_> = (0..size)
            .map(|rank| ExchangeThread { rank, to: Vec::new(), from: Vec::new() })
            .collect();
        for from in 0..size {
            for to in 0..size {
                let (sender, receiver) = channel();
                members[from].to.push(sender);
                members[to].from.push(receiver);
            }
        }
        std::thread::scope(|scope| {
            for member in members {
                scope.spawn(|| run(member));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::threads::run_members;
    use super::*;

    #[test]
    fn everybody_gets_the_sum_of_all() {
        run_members(3, |mut member| {
            let own = [1, member.rank() as u64];
            let (mut all, mut sums) = ([0; 6], [0; 2]);
            sum_all(&mut member, &own, &mut all, &mut sums).unwrap();
            assert_eq!(sums, [3, 3]);
            assert!(all_agree(&mut member, true).unwrap());
            let not_the_last = member.rank() != 2;
            assert!(!all_agree(&mut member, not_the_last).unwrap());
        });
    }

    #[test]
    fn parts_of_any_length_arrive_in_the_order_of_their_senders() {
        run_members(2, |mut member| {
            let (lengths, rank) = ([1, 2], member.rank());
            let sent = [10 * rank as u32; 3];
            let expected = lengths[rank];
            let mut received = vec![7u32; 2 * expected];
            let places = (&mut received[..], &[expected; 2][..]);
            exchange_parts(&mut member, (&sent, &lengths), places).unwrap();
            assert!(received[..expected].iter().all(|&value| value == 0));
            assert!(received[expected..].iter().all(|&value| value == 10));
        });
    }
}
