//! Bytes as a list of decisions. After the last byte, every decision is the first option.

/// The remaining bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next bytes; fewer at the end.
    pub(crate) fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let number = if bound <= 256 { self.byte().into() } else { self.u32() as usize };
        number % bound
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True for one byte in `one_in`.
    pub(crate) fn is_one_in(&mut self, many: u8) -> bool {
        self.byte() % many == many - 1
    }

    pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// A number that is often small, or near the largest, or a power of two.
    pub(crate) fn number(&mut self) -> u64 {
        let small = u64::from(self.byte());
        match small % 4 {
            0 | 1 => small / 4,
            2 => match small / 4 % 3 {
                0 => u64::MAX - small / 12,
                1 => 1 << (small / 12 * 3 % 64),
                _ => (1 << (small / 12 * 3 % 64)) - 1,
            },
            _ => self.u64(),
        }
    }
}
