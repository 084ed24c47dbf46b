//! What an engine can do and what it asks of memory. Planners read this and nothing else.

use super::Operation;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MemoryKind {
    /// Ordinary memory of this process, which any core can read and write.
    Host,
    /// Memory of a device, which only engines that say so can reach.
    Device,
}

/// A set of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operations(u8);

impl Operations {
    /// The set of the given operations.
    pub const fn of(operations: &[Operation]) -> Self {
        let (mut bits, mut index) = (0, 0);
        while index < operations.len() {
            bits |= 1 << operations[index] as u8;
            index += 1;
        }
        Self(bits)
    }

    /// Whether the operation is in the set.
    pub const fn contains(self, operation: Operation) -> bool {
        self.0 & (1 << operation as u8) != 0
    }
}

/// A set of memory kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryKinds(u8);

impl MemoryKinds {
    /// The set of the given kinds.
    pub const fn of(kinds: &[MemoryKind]) -> Self {
        let (mut bits, mut index) = (0, 0);
        while index < kinds.len() {
            bits |= 1 << kinds[index] as u8;
            index += 1;
        }
        Self(bits)
    }

    /// Whether the kind is in the set.
    pub const fn contains(self, kind: MemoryKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }
}

/// Whether memory must be registered before the engine may touch it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Any mapped memory will do.
    NotNeeded,
    /// Pages must be pinned and made known to the engine by the memory layer first, with the
    /// engine's [`pinner`](super::Engine::pinner). Descriptors say where they are pinned; an
    /// invitation to claim chunks cannot, so such an engine does not claim any.
    ByMemoryLayer,
    /// The engine takes any memory and registers it itself, faster if it is registered already.
    ByEngine,
}

/// What an engine can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The operations it knows.
    pub operations: Operations,
    /// The memory it reaches.
    pub memory: MemoryKinds,
    /// The longest descriptor it takes.
    pub largest_descriptor_bytes: usize,
    /// Addresses that are multiples of this go fastest.
    pub preferred_alignment: usize,
    /// A descriptor must not cross a multiple of this, neither at the source nor at the target.
    pub boundary_bytes: Option<usize>,
    /// Whether memory must be registered, and by whom.
    pub registration: Registration,
    /// Whether a channel takes [`Scope::Chunks`](super::Scope::Chunks) descriptors: an invitation
    /// to claim parts of a transfer for as long as there are any.
    pub claims_chunks: bool,
    /// Whether a descriptor over memory in reach never fails. Then its number in the channel is
    /// all that has to be kept of a small transfer, and nothing is allocated for it.
    pub never_fails: bool,
    /// Whether channels move on by themselves. If not, somebody must call `poll`.
    pub self_driving: bool,
    /// Whether a channel can set a notification variable behind the data by itself, if the variable
    /// is pinned for it ([`Pins::variable`](super::Pins)).
    pub notifies: bool,
}

impl Capabilities {
    /// The longest piece that can start at these two addresses, given the descriptor limit and
    /// the boundary.
    pub fn longest_piece(&self, source: u64, target: u64, length: u64) -> u64 {
        let mut longest = length.min(self.largest_descriptor_bytes as u64);
        if let Some(boundary) = self.boundary_bytes {
            let boundary = boundary as u64;
            longest = longest.min(boundary - source % boundary).min(boundary - target % boundary);
        }
        longest
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn paged() -> Capabilities {
        Capabilities {
            operations: Operations::of(&[Operation::Copy]),
            memory: MemoryKinds::of(&[MemoryKind::Host]),
            largest_descriptor_bytes: 1 << 20,
            preferred_alignment: 64,
            boundary_bytes: Some(4096),
            registration: Registration::NotNeeded,
            claims_chunks: false,
            never_fails: false,
            self_driving: true,
            notifies: false,
        }
    }

    fn pieces(source: u64, target: u64, length: u64) -> usize {
        let (engine, mut done, mut count) = (paged(), 0, 0);
        while done < length {
            done += engine.longest_piece(source + done, target + done, length - done);
            count += 1;
        }
        count
    }

    #[test]
    fn page_aligned_copies_need_one_piece_per_page_and_shifted_ones_two() {
        assert_eq!(pieces(0, 0, 4 << 20), 1024);
        assert_eq!(pieces(0, 2048, 4 << 20), 2048);
    }

    #[test]
    fn sets_hold_what_they_were_made_of() {
        let set = Operations::of(&[Operation::Copy, Operation::Compare]);
        assert!(set.contains(Operation::Copy) && set.contains(Operation::Compare));
        assert!(!set.contains(Operation::Fill) && !set.contains(Operation::Move));
    }
}
