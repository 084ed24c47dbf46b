//! The inner loops of reductions: one for each type and operation, that the compiler vectorises, for any processor
//! and for those with AVX2.

use crate::element::{ElementType, ReduceOp};

/// Combines elements in place: into, from, count.
pub(crate) type Kernel = unsafe fn(*mut u8, *const u8, usize);

trait Operation<T> {
    fn apply(one: T, other: T) -> T;
}

macro_rules! operation {
    ($name:ident, |$one:ident, $other:ident| $result:expr, $($element:ty),*) => {
        $(
            impl Operation<$element> for $name {
                #[inline(always)]
                fn apply($one: $element, $other: $element) -> $element {
                    $result
                }
            }
        )*
    };
}

macro_rules! names {
    ($($name:ident),*) => { $(struct $name;)* };
}

names!(Sum, Product, Min, Max, BitAnd, BitOr, BitXor, LogicalAnd, LogicalOr, LogicalXor);

macro_rules! integers {
    ($($element:ty),*) => {
        operation!(Sum, |a, b| a.wrapping_add(b), $($element),*);
        operation!(Product, |a, b| a.wrapping_mul(b), $($element),*);
        operation!(BitAnd, |a, b| a & b, $($element),*);
        operation!(BitOr, |a, b| a | b, $($element),*);
        operation!(BitXor, |a, b| a ^ b, $($element),*);
        operation!(LogicalAnd, |a, b| ((a != 0) & (b != 0)).into(), $($element),*);
        operation!(LogicalOr, |a, b| ((a != 0) | (b != 0)).into(), $($element),*);
        operation!(LogicalXor, |a, b| ((a != 0) ^ (b != 0)).into(), $($element),*);
    };
}

macro_rules! floats {
    ($($element:ident),*) => {
        operation!(Sum, |a, b| a + b, $($element),*);
        operation!(Product, |a, b| a * b, $($element),*);
        operation!(LogicalAnd, |a, b| f32::from((a != 0.0) & (b != 0.0)).into(), $($element),*);
        operation!(LogicalOr, |a, b| f32::from((a != 0.0) | (b != 0.0)).into(), $($element),*);
        operation!(LogicalXor, |a, b| f32::from((a != 0.0) ^ (b != 0.0)).into(), $($element),*);
    };
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);
floats!(f32, f64);
// For floating-point numbers these are single instructions of x86, with the same treatment of NaN.
operation!(Min, |a, b| if b < a { b } else { a }, i8, i16, i32, i64, u8, u16, u32, u64, f32, f64);
operation!(Max, |a, b| if b > a { b } else { a }, i8, i16, i32, i64, u8, u16, u32, u64, f32, f64);

/// # Safety
/// As [`Kernel`]: `into` valid for reads and writes, `from` for reads of `count` elements of `T`, in any alignment, and
/// any bit pattern must be a `T`.
#[inline(always)]
unsafe fn combine<T: Copy, O: Operation<T>>(into: *mut u8, from: *const u8, count: usize) {
    let (into, from) = (into.cast::<T>(), from.cast::<T>());
    for index in 0..count {
        // SAFETY: index < count, inside the ranges that the caller guarantees.
        unsafe {
            let (into, from) = (into.add(index), from.add(index));
            into.write_unaligned(O::apply(into.read_unaligned(), from.read_unaligned()));
        }
    }
}

/// # Safety
/// As [`combine`].
unsafe fn plain<T: Copy, O: Operation<T>>(into: *mut u8, from: *const u8, count: usize) {
    // SAFETY: the caller guarantees the same.
    unsafe { combine::<T, O>(into, from, count) };
}

/// # Safety
/// As [`combine`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn wide<T: Copy, O: Operation<T>>(into: *mut u8, from: *const u8, count: usize) {
    // SAFETY: the caller guarantees the same.
    unsafe { combine::<T, O>(into, from, count) };
}

fn select<T: Copy, O: Operation<T>>() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return wide::<T, O>;
    }
    plain::<T, O>
}

/// The kernel of an operation on a type; `None` for bit operations on floating-point numbers.
pub(crate) fn kernel(element: ElementType, operation: ReduceOp) -> Option<Kernel> {
    match element {
        ElementType::I8 => integer::<i8>(operation),
        ElementType::I16 => integer::<i16>(operation),
        ElementType::I32 => integer::<i32>(operation),
        ElementType::I64 => integer::<i64>(operation),
        ElementType::U8 => integer::<u8>(operation),
        ElementType::U16 => integer::<u16>(operation),
        ElementType::U32 => integer::<u32>(operation),
        ElementType::U64 => integer::<u64>(operation),
        ElementType::F32 => number::<f32>(operation),
        ElementType::F64 => number::<f64>(operation),
    }
}

fn integer<T: Copy>(operation: ReduceOp) -> Option<Kernel>
where
    Sum: Operation<T>,
    Product: Operation<T>,
    Min: Operation<T>,
    Max: Operation<T>,
    BitAnd: Operation<T>,
    BitOr: Operation<T>,
    BitXor: Operation<T>,
    LogicalAnd: Operation<T>,
    LogicalOr: Operation<T>,
    LogicalXor: Operation<T>,
{
    match operation {
        ReduceOp::BitAnd => Some(select::<T, BitAnd>()),
        ReduceOp::BitOr => Some(select::<T, BitOr>()),
        ReduceOp::BitXor => Some(select::<T, BitXor>()),
        _ => number::<T>(operation),
    }
}

fn number<T: Copy>(operation: ReduceOp) -> Option<Kernel>
where
    Sum: Operation<T>,
    Product: Operation<T>,
    Min: Operation<T>,
    Max: Operation<T>,
    LogicalAnd: Operation<T>,
    LogicalOr: Operation<T>,
    LogicalXor: Operation<T>,
{
    Some(match operation {
        ReduceOp::Sum => select::<T, Sum>(),
        ReduceOp::Product => select::<T, Product>(),
        ReduceOp::Min => select::<T, Min>(),
        ReduceOp::Max => select::<T, Max>(),
        ReduceOp::LogicalAnd => select::<T, LogicalAnd>(),
        ReduceOp::LogicalOr => select::<T, LogicalOr>(),
        ReduceOp::LogicalXor => select::<T, LogicalXor>(),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return None,
    })
}
