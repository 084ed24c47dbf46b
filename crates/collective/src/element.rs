//! Types and operations of reductions.

use crate::error::Error;
use crate::kernels::{self, Kernel};
use crate::waiting::Stop;

/// A type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of the types")]
pub enum ElementType {
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F32,
    F64,
}

impl ElementType {
    /// All types.
    pub const ALL: [Self; 10] = [
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::F32,
        Self::F64,
    ];

    /// The length of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Whether it is a floating-point type, which has no bit operations.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

/// An operation of a reduction. It is applied in the order of the ranks, so all ranks get the same result, bit by
/// bit.
///
/// Sums and products of integers wrap around. Minimum and maximum of floating-point numbers keep the number of the
/// lower rank unless that of the higher one is smaller (greater): a NaN is kept if rank 0 has it, and ignored
/// otherwise. The bit operations are for integers only; the logical operations count every number but 0 as true, and
/// yield 1 or 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum ReduceOp {
    Sum,
    Product,
    Min,
    Max,
    BitAnd,
    BitOr,
    BitXor,
    LogicalAnd,
    LogicalOr,
    LogicalXor,
}

impl ReduceOp {
    /// All operations.
    pub const ALL: [Self; 10] = [
        Self::Sum,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
        Self::LogicalAnd,
        Self::LogicalOr,
        Self::LogicalXor,
    ];
}

mod sealed {
    pub trait Sealed {}
}

/// A type that the calls of a team take: the integers and floating-point numbers.
///
/// # Safety
/// Every bit pattern of the length of `TYPE` must be a value of the type.
pub unsafe trait Element: Copy + sealed::Sealed + 'static {
    /// The type of the elements.
    const TYPE: ElementType;
}

macro_rules! elements {
    ($($rust:ty => $name:ident),* $(,)?) => {
        $(
            impl sealed::Sealed for $rust {}
            // SAFETY: a number without padding or invalid values, of the length of the type.
            unsafe impl Element for $rust {
                const TYPE: ElementType = ElementType::$name;
            }
        )*
    };
}

elements! {
    i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32, u64 => U64, f32 => F32, f64 => F64,
}

#[cfg(target_pointer_width = "64")]
elements! { isize => I64, usize => U64 }
#[cfg(target_pointer_width = "32")]
elements! { isize => I32, usize => U32 }

/// A function that combines elements.
type CombineFunction<'a> = dyn FnMut(*mut u8, *const u8, usize) -> Result<(), Stop> + 'a;

/// How elements are combined.
pub enum Reduction<'a> {
    /// An operation on numbers.
    Numbers(ElementType, ReduceOp),
    /// A function of the caller.
    Function {
        /// The length of an element.
        element_bytes: usize,
        /// Combines the elements of some ranks (`*mut u8`) with those of the next rank (`*const u8`), in place. Both
        /// have the given number of elements, are aligned to eight bytes, and belong to this process. [`Stop`], or a
        /// panic, ends the operation on all ranks, and breaks the team.
        combine: &'a mut CombineFunction<'a>,
    },
}

impl std::fmt::Debug for Reduction<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Numbers(element, operation) => write!(f, "{operation:?} of {element:?}"),
            Self::Function { element_bytes, .. } => {
                write!(f, "function on elements of {element_bytes} bytes")
            }
        }
    }
}

impl Reduction<'_> {
    pub(crate) fn element_bytes(&self) -> usize {
        match self {
            Self::Numbers(element, _) => element.bytes(),
            Self::Function { element_bytes, .. } => *element_bytes,
        }
    }

    /// A number for type and operation, which ranks compare. Of functions only the length of an element is known.
    pub(crate) fn kind(&self) -> u64 {
        match self {
            Self::Numbers(element, operation) => 1 + ((*element as u64) << 4 | *operation as u64),
            Self::Function { element_bytes, .. } => (*element_bytes as u64) << 8,
        }
    }

    /// Checks that the operation exists for the type.
    pub(crate) fn prepare(&mut self) -> Result<Combine<'_>, Error> {
        let element_bytes = self.element_bytes();
        let how = match self {
            Self::Numbers(element, operation) => {
                let kernel = kernels::kernel(*element, *operation);
                How::Kernel(kernel.ok_or(Error::Argument("bit operations are for integers only"))?)
            }
            Self::Function { element_bytes: 0, .. } => {
                return Err(Error::Argument("elements of no bytes cannot be reduced"));
            }
            Self::Function { combine, .. } => How::Function(&mut **combine),
        };
        Ok(Combine { element_bytes, how })
    }
}

/// A reduction that can be executed.
pub(crate) struct Combine<'a> {
    pub(crate) element_bytes: usize,
    how: How<'a>,
}

enum How<'a> {
    Kernel(Kernel),
    Function(&'a mut CombineFunction<'a>),
}

impl Combine<'_> {
    /// Whether it is a function of the caller, which must not see memory that other processes write.
    pub(crate) fn is_function(&self) -> bool {
        matches!(self.how, How::Function(_))
    }

    /// Combines `count` elements, for `Shared::combine`.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes and `from` for reads of `count` elements; the two must not overlap.
    /// If it is a function of the caller, no other process may write to them.
    #[inline]
    pub(crate) unsafe fn apply(
        &mut self,
        into: *mut u8,
        from: *const u8,
        count: usize,
    ) -> Result<(), Stop> {
        match &mut self.how {
            // SAFETY: the caller guarantees what the kernel needs.
            How::Kernel(kernel) => unsafe { kernel(into, from, count) },
            How::Function(combine) => combine(into, from, count)?,
        }
        Ok(())
    }
}
