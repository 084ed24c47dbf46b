//! The operations of the inner endpoint in flight, by context.

use super::fetches::RemoteFetch;

/// An operation of the inner endpoint, with the memory of this side that it uses.
#[derive(Debug)]
pub(super) enum InFlightOp {
    /// A packet to a peer.
    Packet { peer: usize, is_reply: bool, _bytes: Vec<u8> },
    /// The bytes of an announced message to a peer.
    DataSend { peer: usize, ticket: u64, _bounce: Option<Vec<u8>> },
    /// The buffer of a fetch.
    DataReceive { peer: usize, fetch: RemoteFetch },
    /// A buffer for the next packet.
    PacketBuffer { bytes: Vec<u8> },
}

/// All operations in flight.
#[derive(Debug, Default)]
pub(super) struct InFlightOps {
    all: Vec<Option<InFlightOp>>,
    free: Vec<usize>,
}

impl InFlightOps {
    /// The context of the next operation.
    pub(super) fn next_context(&self) -> u64 {
        // Some providers ignore null contexts.
        1 + self.free.last().copied().unwrap_or(self.all.len()) as u64
    }

    /// Adds an operation, under the context from `next_context`.
    pub(super) fn insert(&mut self, op: InFlightOp) {
        match self.free.pop() {
            Some(index) => self.all[index] = Some(op),
            None => self.all.push(Some(op)),
        }
    }

    /// Removes a completed operation.
    pub(super) fn take(&mut self, context: u64) -> Option<InFlightOp> {
        let index = usize::try_from(context.checked_sub(1)?).ok()?;
        let op = self.all.get_mut(index)?.take()?;
        self.free.push(index);
        Some(op)
    }

    /// Removes all operations.
    pub(super) fn take_all(&mut self) -> Vec<InFlightOp> {
        self.free.clear();
        std::mem::take(&mut self.all).into_iter().flatten().collect()
    }

    /// All operations, with their contexts.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &InFlightOp)> {
        let contexts = 1..;
        contexts.zip(&self.all).filter_map(|(context, op)| Some((context, op.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_used_again_and_found_once() {
        let mut ops = InFlightOps::default();
        let buffer = || InFlightOp::PacketBuffer { bytes: Vec::new() };
        let (first, _) = (ops.next_context(), ops.insert(buffer()));
        let (second, _) = (ops.next_context(), ops.insert(buffer()));
        assert!(first != second && first != 0);
        assert!(ops.take(first).is_some() && ops.take(first).is_none());
        assert_eq!(ops.next_context(), first);
        assert_eq!(ops.iter().count(), 1);
        assert!(ops.take(0).is_none() && ops.take(99).is_none());
    }
}
