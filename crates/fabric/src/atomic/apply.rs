//! The execution of operations, element by element.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::{AtomicClass, AtomicKind, AtomicOp, Comparison, Datatype};

/// The memory is not aligned to the size of its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Misaligned;

/// The operands of an operation, one per element, in memory of this side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtomicOperands<'a> {
    pub(crate) values: &'a [u8],
    /// The values that the memory is compared with.
    pub(crate) compare: &'a [u8],
}

/// A number that atomic instructions change.
trait Element: Copy + PartialOrd {
    const ZERO: Self;
    const ONE: Self;

    /// The element at an index of packed bytes; zero beyond their end.
    fn load(bytes: &[u8], index: usize) -> Self;
    fn store(self, bytes: &mut Vec<u8>);
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    /// Combines the bits of two numbers. Only integers have any.
    fn combine_bits(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self;

    /// Replaces the number in memory by the result of `change`, unless that is `None`. Returns the
    /// number before the change.
    ///
    /// # Safety
    /// `at` must be valid for reads and writes and aligned. Other threads and processes may access
    /// the memory by atomic instructions at the same time.
    unsafe fn update(at: *mut u8, change: impl Fn(Self) -> Option<Self>) -> Self;
}

macro_rules! elements {
    ($($type:ty, $cell:ty, $zero:expr, $one:expr, $to:expr, $from:expr, $sum:expr, $product:expr, $bits:expr;)*) => {$(
        impl Element for $type {
            const ZERO: Self = $zero;
            const ONE: Self = $one;

            fn load(bytes: &[u8], index: usize) -> Self {
                const SIZE: usize = size_of::<$type>();
                let found = bytes.get(index * SIZE..).and_then(|rest| rest.first_chunk::<SIZE>());
                found.map_or(Self::ZERO, |bytes| Self::from_ne_bytes(*bytes))
            }

            fn store(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_ne_bytes());
            }

            fn sum(self, other: Self) -> Self {
                $sum(self, other)
            }

            fn product(self, other: Self) -> Self {
                $product(self, other)
            }

            fn combine_bits(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
                $bits(self, other, &combine as &dyn Fn(u64, u64) -> u64)
            }

            unsafe fn update(at: *mut u8, change: impl Fn(Self) -> Option<Self>) -> Self {
                // SAFETY: the caller guarantees an aligned element, which all others access by
                // atomic instructions too.
                let cell = unsafe { &*at.cast::<$cell>() };
                let mut before = cell.load(Ordering::Acquire);
                loop {
                    let Some(after) = change($from(before)) else { return $from(before) };
                    let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
                    match cell.compare_exchange_weak(before, $to(after), success, failure) {
                        Ok(_) => return $from(before),
                        Err(changed) => before = changed,
                    }
                }
            }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty, $cell:ty, $raw:ty;)*) => { elements! {$(
        $type, $cell, 0, 1,
        |value: $type| value as $raw, |raw: $raw| raw as $type,
        <$type>::wrapping_add, <$type>::wrapping_mul,
        |one: $type, other: $type, combine: &dyn Fn(u64, u64) -> u64| {
            combine(one as u64, other as u64) as $type
        };
    )*}};
}

integers! {
    i8, AtomicU8, u8;
    u8, AtomicU8, u8;
    i16, AtomicU16, u16;
    u16, AtomicU16, u16;
    i32, AtomicU32, u32;
    u32, AtomicU32, u32;
    i64, AtomicU64, u64;
    u64, AtomicU64, u64;
}

elements! {
    f32, AtomicU32, 0.0, 1.0, f32::to_bits, f32::from_bits,
        |one, other| one + other, |one, other| one * other, |one, _, _| one;
    f64, AtomicU64, 0.0, 1.0, f64::to_bits, f64::from_bits,
        |one, other| one + other, |one, other| one * other, |one, _, _| one;
}

/// Executes an operation on `count` elements, and appends the values before it if the operation
/// returns them.
///
/// # Safety
/// `at` must be valid for reads and writes of `count` elements. Other threads and processes may
/// access the memory at the same time.
pub(crate) unsafe fn apply(
    kind: AtomicKind,
    at: *mut u8,
    count: usize,
    operands: AtomicOperands<'_>,
    results: &mut Vec<u8>,
) -> Result<(), Misaligned> {
    if !(at as usize).is_multiple_of(kind.datatype.size()) {
        return Err(Misaligned);
    }
    // SAFETY: the caller guarantees the memory, and it is aligned.
    unsafe {
        match kind.datatype {
            Datatype::I8 => apply_to::<i8>(kind, at, count, operands, results),
            Datatype::U8 => apply_to::<u8>(kind, at, count, operands, results),
            Datatype::I16 => apply_to::<i16>(kind, at, count, operands, results),
            Datatype::U16 => apply_to::<u16>(kind, at, count, operands, results),
            Datatype::I32 => apply_to::<i32>(kind, at, count, operands, results),
            Datatype::U32 => apply_to::<u32>(kind, at, count, operands, results),
            Datatype::I64 => apply_to::<i64>(kind, at, count, operands, results),
            Datatype::U64 => apply_to::<u64>(kind, at, count, operands, results),
            Datatype::F32 => apply_to::<f32>(kind, at, count, operands, results),
            Datatype::F64 => apply_to::<f64>(kind, at, count, operands, results),
        }
    }
    Ok(())
}

/// # Safety
/// As for [`apply`]; `at` must be aligned.
unsafe fn apply_to<E: Element>(
    kind: AtomicKind,
    at: *mut u8,
    count: usize,
    operands: AtomicOperands<'_>,
    results: &mut Vec<u8>,
) {
    for index in 0..count {
        let value = E::load(operands.values, index);
        let compare = E::load(operands.compare, index);
        // SAFETY: the caller guarantees `count` elements.
        let before = unsafe {
            let at = at.add(index * size_of::<E>());
            E::update(at, |before| changed(kind.op, before, value, compare))
        };
        if kind.class != AtomicClass::Write {
            before.store(results);
        }
    }
}

/// The number after an operation; `None` if it stays.
#[inline]
fn changed<E: Element>(op: AtomicOp, before: E, value: E, compare: E) -> Option<E> {
    let is_true = |number: E| number != E::ZERO;
    let truth = |is_true: bool| Some(if is_true { E::ONE } else { E::ZERO });
    match op {
        AtomicOp::Min => (value < before).then_some(value),
        AtomicOp::Max => (value > before).then_some(value),
        AtomicOp::Sum => Some(before.sum(value)),
        AtomicOp::Product => Some(before.product(value)),
        AtomicOp::LogicalOr => truth(is_true(before) || is_true(value)),
        AtomicOp::LogicalAnd => truth(is_true(before) && is_true(value)),
        AtomicOp::LogicalXor => truth(is_true(before) != is_true(value)),
        AtomicOp::BitOr => Some(before.combine_bits(value, |one, other| one | other)),
        AtomicOp::BitAnd => Some(before.combine_bits(value, |one, other| one & other)),
        AtomicOp::BitXor => Some(before.combine_bits(value, |one, other| one ^ other)),
        AtomicOp::Read => None,
        AtomicOp::Write => Some(value),
        AtomicOp::SwapIf(comparison) => match comparison {
            Comparison::Equal => compare == before,
            Comparison::NotEqual => compare != before,
            Comparison::LessOrEqual => compare <= before,
            Comparison::Less => compare < before,
            Comparison::GreaterOrEqual => compare >= before,
            Comparison::Greater => compare > before,
        }
        .then_some(value),
        AtomicOp::SwapBits => {
            let kept = before.combine_bits(compare, |before, mask| before & !mask);
            let swapped = value.combine_bits(compare, |value, mask| value & mask);
            Some(kept.combine_bits(swapped, |one, other| one | other))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::*;

    /// Applies an operation to one number, and returns the numbers after and before it.
    fn run<E: Element>(
        class: AtomicClass,
        datatype: i32,
        op: i32,
        numbers: [E; 3],
    ) -> (E, Option<E>) {
        let [memory, value, compare] = numbers.map(|number| {
            let mut bytes = Vec::new();
            number.store(&mut bytes);
            bytes
        });
        let mut cell = 0u64;
        let at = (&raw mut cell).cast::<u8>();
        let kind = AtomicKind::new(class, datatype, op).unwrap();
        let operands = AtomicOperands { values: &value, compare: &compare };
        let mut results = Vec::new();
        // SAFETY: the cell has space for any element, and is aligned for all of them.
        unsafe {
            std::ptr::copy_nonoverlapping(memory.as_ptr(), at, memory.len());
            apply(kind, at, 1, operands, &mut results).unwrap();
        }
        let after = E::load(&cell.to_ne_bytes(), 0);
        (after, (!results.is_empty()).then(|| E::load(&results, 0)))
    }

    #[test]
    fn every_operation_does_what_its_name_says() {
        let expected: [(i32, i32); 11] = [
            (FI_MIN, 3),
            (FI_MAX, 12),
            (FI_SUM, 15),
            (FI_PROD, 36),
            (FI_LOR, 1),
            (FI_LAND, 1),
            (FI_BOR, 15),
            (FI_BAND, 0),
            (FI_LXOR, 0),
            (FI_BXOR, 15),
            (FI_ATOMIC_WRITE, 3),
        ];
        for (op, after) in expected {
            let write = run::<i32>(AtomicClass::Write, FI_INT32, op, [12, 3, 0]);
            assert_eq!(write, (after, None), "operation {op}");
            let fetch = run::<i8>(AtomicClass::Fetch, FI_INT8, op, [12, 3, 0]);
            assert_eq!(fetch, (after as i8, Some(12)), "operation {op}");
            if ![FI_BOR, FI_BAND, FI_BXOR].contains(&op) {
                let fetch = run::<f64>(AtomicClass::Fetch, FI_DOUBLE, op, [12.0, 3.0, 0.0]);
                assert_eq!(fetch, (f64::from(after), Some(12.0)), "operation {op}");
            }
        }
        let read = run::<u16>(AtomicClass::Fetch, FI_UINT16, FI_ATOMIC_READ, [12, 3, 0]);
        assert_eq!(read, (12, Some(12)));
    }

    #[test]
    fn a_swap_depends_on_the_compare_value() {
        // By operation: whether a compare value below, at and above the memory swaps.
        let swaps = [
            (FI_CSWAP, [false, true, false]),
            (FI_CSWAP_NE, [true, false, true]),
            (FI_CSWAP_LE, [true, true, false]),
            (FI_CSWAP_LT, [true, false, false]),
            (FI_CSWAP_GE, [false, true, true]),
            (FI_CSWAP_GT, [false, false, true]),
        ];
        for (op, expected) in swaps {
            let outcomes = [4, 5, 6].map(|compare| {
                let done = run::<i64>(AtomicClass::Compare, FI_INT64, op, [5, -9, compare]);
                assert_eq!(done.1, Some(5));
                done.0 == -9
            });
            assert_eq!(outcomes, expected, "operation {op}");
        }
        let numbers = [0b1010_1010, 0b1111_0000, 0b1100_1100];
        let mixed = run::<u32>(AtomicClass::Compare, FI_UINT32, FI_MSWAP, numbers);
        assert_eq!(mixed, (0b1110_0010, Some(0b1010_1010)));
    }

    #[test]
    fn numbers_wrap_around_and_keep_their_sign() {
        let sum = run::<i8>(AtomicClass::Fetch, FI_INT8, FI_SUM, [127, 1, 0]);
        assert_eq!(sum, (-128, Some(127)));
        let least = run::<i16>(AtomicClass::Write, FI_INT16, FI_MIN, [5, -7, 0]);
        assert_eq!(least.0, -7);
        let bits = run::<i64>(AtomicClass::Write, FI_INT64, FI_BAND, [-1, i64::MIN, 0]);
        assert_eq!(bits.0, i64::MIN);
    }

    #[test]
    fn memory_that_is_not_aligned_is_refused() {
        let mut memory = [0u64; 2];
        let kind = AtomicKind::new(AtomicClass::Write, FI_INT32, FI_SUM).unwrap();
        let operands = AtomicOperands { values: &[1, 0, 0, 0], compare: &[] };
        // SAFETY: the memory is valid.
        let outcome = unsafe {
            let at = memory.as_mut_ptr().cast::<u8>().add(2);
            apply(kind, at, 1, operands, &mut Vec::new())
        };
        assert_eq!((outcome, memory), (Err(Misaligned), [0; 2]));
    }

    #[test]
    fn threads_that_add_lose_nothing() {
        let cell = AtomicU64::new(0f64.to_bits());
        let kind = AtomicKind::new(AtomicClass::Write, FI_DOUBLE, FI_SUM).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let one = 1f64.to_ne_bytes();
                    let operands = AtomicOperands { values: &one, compare: &[] };
                    for _ in 0..10_000 {
                        // SAFETY: the cell is valid and aligned, and only atomics access it.
                        unsafe {
                            let at = cell.as_ptr().cast();
                            apply(kind, at, 1, operands, &mut Vec::new()).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(f64::from_bits(cell.into_inner()), 40_000.0);
    }
}
