//! Memory with guards that detect writes beside it.

use memferry_message::ShareableBuffer;

use crate::pattern::{fill, first_wrong};

/// Guard bytes before and behind the memory of a test. An odd number, so that nothing in between is
/// aligned by chance.
const GUARD: usize = 261;
const GUARD_SEED: u64 = 0x67_7561_7264;

enum Backing {
    Plain(Vec<u8>),
    Shareable(ShareableBuffer),
}

/// Memory for a message with guards on both sides.
pub struct GuardedBuffer {
    backing: Backing,
    length: usize,
}

impl GuardedBuffer {
    /// Memory of the heap.
    pub fn plain(length: usize) -> Self {
        Self::over(Backing::Plain(vec![0; length + 2 * GUARD]), length)
    }

    /// Memory that peers can map.
    pub fn shareable(length: usize) -> Self {
        Self::try_new(length, true).unwrap()
    }

    /// As `new`, where shared memory may be exhausted.
    pub fn try_new(length: usize, shareable: bool) -> std::io::Result<Self> {
        if !shareable {
            return Ok(Self::plain(length));
        }
        let buffer = ShareableBuffer::new(length + 2 * GUARD)?;
        Ok(Self::over(Backing::Shareable(buffer), length))
    }

    /// Memory of either kind.
    pub fn new(length: usize, shareable: bool) -> Self {
        if shareable { Self::shareable(length) } else { Self::plain(length) }
    }

    fn over(backing: Backing, length: usize) -> Self {
        let mut this = Self { backing, length };
        let all = this.all_mut();
        fill(&mut all[..GUARD], GUARD_SEED);
        fill(&mut all[GUARD + length..], GUARD_SEED);
        this
    }

    fn all(&self) -> &[u8] {
        let whole = self.length + 2 * GUARD;
        match &self.backing {
            Backing::Plain(bytes) => &bytes[..whole],
            Backing::Shareable(buffer) => &buffer[..whole],
        }
    }

    fn all_mut(&mut self) -> &mut [u8] {
        let whole = self.length + 2 * GUARD;
        match &mut self.backing {
            Backing::Plain(bytes) => &mut bytes[..whole],
            Backing::Shareable(buffer) => &mut buffer[..whole],
        }
    }

    /// The number of bytes between the guards.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The memory between the guards. Not to be called while a message is in flight.
    pub fn bytes(&self) -> &[u8] {
        &self.all()[GUARD..GUARD + self.length]
    }

    /// The bytes between the guards, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let length = self.length;
        &mut self.all_mut()[GUARD..GUARD + length]
    }

    /// The address of the memory, for messages.
    pub fn address(&mut self) -> *mut u8 {
        self.bytes_mut().as_mut_ptr()
    }

    /// Panics if a byte beside the memory has changed.
    pub fn check_guards(&self) {
        let all = self.all();
        let (before, behind) = (&all[..GUARD], &all[GUARD + self.length..]);
        assert_eq!(first_wrong(before, GUARD_SEED), None, "written before the memory");
        assert_eq!(first_wrong(behind, GUARD_SEED), None, "written behind the memory");
    }
}
