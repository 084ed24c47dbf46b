//! The capabilities of an engine and its requirements of memory. Planners read nothing else of an
//! engine.

use super::Opcode;

/// The location of memory.
///
/// ```
/// use memferry::{Ferry, MemoryKind};
///
/// let ferry = Ferry::new()?;
/// let buffer = [0u8; 64];
/// assert_eq!(ferry.memory_kind(buffer.as_ptr()), MemoryKind::Host);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MemoryKind {
    /// Ordinary memory of this process, which every core can read and write.
    Host,
    /// Memory of a device, which only engines with this kind in [`Capabilities::memory`] can
    /// access.
    Device,
}

impl MemoryKind {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

/// A set of operations.
///
/// ```
/// use memferry::engine::{Opcode, OpcodeSet};
///
/// let operations = OpcodeSet::of(&[Opcode::Copy, Opcode::Fill]);
/// assert!(operations.contains(Opcode::Fill) && !operations.contains(Opcode::Compare));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpcodeSet(u8);

impl OpcodeSet {
    /// Every operation.
    pub const ALL: Self = Self::of(&[
        Opcode::Copy,
        Opcode::Move,
        Opcode::Fill,
        Opcode::Compare,
        Opcode::Crc,
        Opcode::CopyCrc,
        Opcode::Dualcast,
    ]);

    /// The set of the given operations.
    pub const fn of(operations: &[Opcode]) -> Self {
        let (mut bits, mut index) = (0, 0);
        while index < operations.len() {
            bits |= 1 << operations[index] as u8;
            index += 1;
        }
        Self(bits)
    }

    /// Whether the operation is in the set.
    pub const fn contains(self, operation: Opcode) -> bool {
        self.0 & (1 << operation as u8) != 0
    }
}

/// A set of memory kinds.
///
/// ```
/// use memferry::engine::{MemoryKind, MemoryKindSet};
///
/// let host_only = MemoryKindSet::of(&[MemoryKind::Host]);
/// assert!(!host_only.contains(MemoryKind::Device));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryKindSet(u8);

impl MemoryKindSet {
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

/// Who registers memory for the engine.
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{Engine, RegistrationMode};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// assert_eq!(engine.capabilities().registration, RegistrationMode::NotRequired);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegistrationMode {
    /// No registration: the engine accepts any mapped memory.
    NotRequired,
    /// The submitter pins the pages with the engine's [`pinner`](super::Engine::pinner) and
    /// attaches the leases to the descriptors. A work offer has no leases, so such an engine does
    /// not claim chunks.
    BySubmitter,
    /// The engine accepts any memory and registers it itself; registered memory is faster.
    ByEngine,
}

/// The capabilities of an engine.
///
/// ```
/// use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
/// use memferry::engine::{Capabilities, Engine, Opcode};
///
/// let engine = CpuEngine::new(CpuProfile::load(&ProfileSource::BuiltIn)?);
/// let capabilities: &Capabilities = engine.capabilities();
/// assert!(capabilities.operations.contains(Opcode::Compare) && capabilities.infallible);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The supported operations.
    pub operations: OpcodeSet,
    /// The kinds of memory that the engine can access.
    pub memory: MemoryKindSet,
    /// The maximum length of a descriptor in bytes.
    pub max_descriptor_bytes: usize,
    /// The address alignment in bytes at which the engine is fastest.
    pub preferred_alignment: usize,
    /// A boundary in bytes: a descriptor must not cross a multiple of it, neither at the source nor
    /// at the target.
    pub boundary_bytes: Option<usize>,
    /// Who registers memory, if it must be registered.
    pub registration: RegistrationMode,
    /// Whether a channel accepts work offers
    /// ([`DescriptorScope::WorkOffer`](super::DescriptorScope::WorkOffer)) and claims chunks of a
    /// transfer until none is left.
    pub claims_chunks: bool,
    /// Whether a descriptor over accessible memory never fails. Then the sequence is the whole
    /// state of a small transfer, and nothing is allocated for it.
    pub infallible: bool,
    /// Whether channels make progress automatically. If not, a thread must call `poll`.
    pub auto_progress: bool,
    /// Whether a channel can write a notification variable after the data, if the variable is
    /// pinned for the engine ([`DescriptorLeases::variable`](super::DescriptorLeases)).
    pub writes_notifications: bool,
}

impl Capabilities {
    /// The maximum length of a part that starts at these two addresses, given the descriptor limit
    /// and the boundary.
    pub fn max_part(&self, source: u64, target: u64, length: u64) -> u64 {
        let mut max_bytes = length.min(self.max_descriptor_bytes as u64);
        if let Some(boundary) = self.boundary_bytes {
            let boundary = boundary as u64;
            max_bytes =
                max_bytes.min(boundary - source % boundary).min(boundary - target % boundary);
        }
        max_bytes
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn paged() -> Capabilities {
        Capabilities {
            operations: OpcodeSet::of(&[Opcode::Copy]),
            memory: MemoryKindSet::of(&[MemoryKind::Host]),
            max_descriptor_bytes: 1 << 20,
            preferred_alignment: 64,
            boundary_bytes: Some(4096),
            registration: RegistrationMode::NotRequired,
            claims_chunks: false,
            infallible: false,
            auto_progress: true,
            writes_notifications: false,
        }
    }

    fn part_count(source: u64, target: u64, length: u64) -> usize {
        let (engine, mut done, mut count) = (paged(), 0, 0);
        while done < length {
            done += engine.max_part(source + done, target + done, length - done);
            count += 1;
        }
        count
    }

    #[test]
    fn page_aligned_copies_need_one_piece_per_page_and_shifted_ones_two() {
        assert_eq!(part_count(0, 0, 4 << 20), 1024);
        assert_eq!(part_count(0, 2048, 4 << 20), 2048);
    }

    #[test]
    fn sets_hold_what_they_were_made_of() {
        let set = OpcodeSet::of(&[Opcode::Copy, Opcode::Compare]);
        assert!(set.contains(Opcode::Copy) && set.contains(Opcode::Compare));
        assert!(!set.contains(Opcode::Fill) && !set.contains(Opcode::Move));
    }
}
