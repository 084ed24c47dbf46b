//! Names of memory and its owners that can be stored and sent to other processes.
//!
//! A handle is a number and a generation. Numbers are reused, generations are not, so a handle that
//! outlived its object fails instead of naming another. Handles are names only:
//! [`lookup`](crate::lookup) translates them.

use thiserror::Error;

/// Names a process: a small number, and a generation that distinguishes the uses of that number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessHandle {
    number: u16,
    generation: u32,
}

impl ProcessHandle {
    /// Creates a handle. Generation 0 is an error.
    pub const fn new(number: u16, generation: u32) -> Result<Self, HandleError> {
        if generation == 0 {
            return Err(HandleError::NoGeneration);
        }
        Ok(Self { number, generation })
    }

    /// The number, which later processes reuse.
    pub const fn number(self) -> u16 {
        self.number
    }

    /// The generation of the number, from 1.
    pub const fn generation(self) -> u32 {
        self.generation
    }

    /// Encodes the handle in one word, which is never 0.
    pub(crate) const fn to_word(self) -> u64 {
        (self.generation as u64) << 16 | self.number as u64
    }

    /// Decodes a word from [`ProcessHandle::to_word`]; `None` for 0.
    pub(crate) const fn from_word(word: u64) -> Option<Self> {
        match Self::new(word as u16, (word >> 16) as u32) {
            Ok(handle) => Some(handle),
            Err(_) => None,
        }
    }
}

/// Names a communication buffer of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferHandle {
    process: ProcessHandle,
    number: u32,
    generation: u32,
}

/// First byte of a buffer handle: the kind in the upper half, the version in the lower.
const BUFFER_KIND_AND_VERSION: u8 = 0xb1;

impl BufferHandle {
    /// The length of the encoded handle, in bytes.
    pub const BYTES: usize = 16;

    /// Creates a handle. Generation 0 is an error.
    pub const fn new(
        process: ProcessHandle,
        number: u32,
        generation: u32,
    ) -> Result<Self, HandleError> {
        if generation == 0 {
            return Err(HandleError::NoGeneration);
        }
        Ok(Self { process, number, generation })
    }

    /// The process that owns the buffer.
    pub const fn process(self) -> ProcessHandle {
        self.process
    }

    /// The number of the buffer in its process, which later buffers reuse.
    pub const fn number(self) -> u32 {
        self.number
    }

    /// The generation of the number, from 1.
    pub const fn generation(self) -> u32 {
        self.generation
    }

    /// Encodes the handle for transport: kind and version, checksum, process and its generation,
    /// buffer and its generation; all little-endian.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = BUFFER_KIND_AND_VERSION;
        bytes[2..4].copy_from_slice(&self.process.number.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.process.generation.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.generation.to_le_bytes());
        bytes[1] = check(&bytes);
        bytes
    }

    /// Decodes the result of [`BufferHandle::to_bytes`]; any other bytes are an error.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Result<Self, HandleError> {
        if bytes[0] != BUFFER_KIND_AND_VERSION {
            return Err(HandleError::WrongKind(bytes[0]));
        }
        if bytes[1] != check(&bytes) {
            return Err(HandleError::Damaged);
        }
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let process = ProcessHandle::new(u16::from_le_bytes([bytes[2], bytes[3]]), word(4))?;
        Self::new(process, word(8), word(12))
    }
}

/// The checksum of all other bytes. It detects every change of a single byte.
fn check(bytes: &[u8; BufferHandle::BYTES]) -> u8 {
    // Each step is a bijection, so a changed byte always changes the result.
    let fold = |sum: u8, byte: &u8| (sum ^ byte).rotate_left(3);
    bytes[2..].iter().fold(bytes[0], fold)
}

/// Names an address in the memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessAddress {
    /// The process.
    pub process: ProcessHandle,
    /// The address in that process.
    pub address: u64,
}

/// Why bytes or numbers are not a handle.
///
/// ```
/// use memferry::message::{HandleError, WindowHandle};
///
/// assert_eq!(WindowHandle::from_bytes([0; WindowHandle::BYTES]), Err(HandleError::WrongKind(0)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum HandleError {
    /// The first byte is another kind of handle, or an unknown version.
    #[error("not a buffer handle of this version: it begins with {0:#04x}")]
    WrongKind(u8),
    /// The checksum does not match.
    #[error("the handle is damaged: its checksum does not match")]
    Damaged,
    /// The generation is 0, which no handle has.
    #[error("the handle has generation 0")]
    NoGeneration,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn handle() -> BufferHandle {
        BufferHandle::new(ProcessHandle::new(7, 3).unwrap(), 0x1234_5678, 9).unwrap()
    }

    #[test]
    fn a_buffer_handle_survives_the_way_through_bytes() {
        assert_eq!(BufferHandle::from_bytes(handle().to_bytes()), Ok(handle()));
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let good = handle().to_bytes();
        for (at, flip) in (0..BufferHandle::BYTES).flat_map(|at| (1..=255).map(move |x| (at, x))) {
            let mut bytes = good;
            bytes[at] ^= flip;
            assert!(BufferHandle::from_bytes(bytes).is_err(), "byte {at} changed by {flip:#x}");
        }
    }

    #[test]
    fn a_generation_of_zero_makes_no_handle() {
        assert_eq!(ProcessHandle::new(1, 0), Err(HandleError::NoGeneration));
        let process = ProcessHandle::new(1, 1).unwrap();
        assert_eq!(BufferHandle::new(process, 1, 0), Err(HandleError::NoGeneration));
        assert_eq!(ProcessHandle::from_word(0), None);
        assert_eq!(ProcessHandle::from_word(process.to_word()), Some(process));
    }
}
