//! Atomic operations: which are offered, and their execution with the processor's atomic instructions.
//!
//! The owner of the memory and every initiator that has it mapped execute operations in the same
//! way, on the same memory, so all of them are atomic with respect to each other. An operation on
//! several elements is atomic for each element.

mod apply;

use std::ffi::c_int;

use memferry_message::Rights;

use crate::abi::*;
use crate::guard::{FiError, Result};
pub(crate) use apply::{AtomicOperands, Misaligned, apply};

/// The maximum number of bytes of one operation on a peer's memory.
pub(crate) const MAX_ATOMIC_BYTES: usize = 4 << 10;

/// What an operation returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicClass {
    /// Nothing.
    Write,
    /// The previous value.
    Fetch,
    /// The previous value, of an operation that compares.
    Compare,
}

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Min,
    Max,
    Sum,
    Product,
    LogicalOr,
    LogicalAnd,
    BitOr,
    BitAnd,
    LogicalXor,
    BitXor,
    Read,
    Write,
    /// Swaps if the comparison of the compare value with the memory holds.
    SwapIf(Comparison),
    /// Swaps the bits that the compare value has.
    SwapBits,
}

/// The comparison of a swap: of the compare value with the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    LessOrEqual,
    Less,
    GreaterOrEqual,
    Greater,
}

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Datatype {
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F32,
    F64,
}

/// An operation on elements of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AtomicKind {
    pub(crate) op: AtomicOp,
    pub(crate) datatype: Datatype,
    pub(crate) class: AtomicClass,
}

impl Datatype {
    fn new(code: c_int) -> Option<Self> {
        const ALL: [Datatype; 10] = [
            Datatype::I8,
            Datatype::U8,
            Datatype::I16,
            Datatype::U16,
            Datatype::I32,
            Datatype::U32,
            Datatype::I64,
            Datatype::U64,
            Datatype::F32,
            Datatype::F64,
        ];
        ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// The size of an element in bytes, which is its alignment too.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

impl AtomicOp {
    fn new(code: c_int) -> Option<Self> {
        Some(match code {
            FI_MIN => Self::Min,
            FI_MAX => Self::Max,
            FI_SUM => Self::Sum,
            FI_PROD => Self::Product,
            FI_LOR => Self::LogicalOr,
            FI_LAND => Self::LogicalAnd,
            FI_BOR => Self::BitOr,
            FI_BAND => Self::BitAnd,
            FI_LXOR => Self::LogicalXor,
            FI_BXOR => Self::BitXor,
            FI_ATOMIC_READ => Self::Read,
            FI_ATOMIC_WRITE => Self::Write,
            FI_CSWAP => Self::SwapIf(Comparison::Equal),
            FI_CSWAP_NE => Self::SwapIf(Comparison::NotEqual),
            FI_CSWAP_LE => Self::SwapIf(Comparison::LessOrEqual),
            FI_CSWAP_LT => Self::SwapIf(Comparison::Less),
            FI_CSWAP_GE => Self::SwapIf(Comparison::GreaterOrEqual),
            FI_CSWAP_GT => Self::SwapIf(Comparison::Greater),
            FI_MSWAP => Self::SwapBits,
            _ => return None,
        })
    }

    fn is_of_class(self, class: AtomicClass) -> bool {
        let compares = matches!(self, Self::SwapIf(_) | Self::SwapBits);
        match class {
            AtomicClass::Write => !compares && self != Self::Read,
            AtomicClass::Fetch => !compares,
            AtomicClass::Compare => compares,
        }
    }

    fn is_bitwise(self) -> bool {
        matches!(self, Self::BitOr | Self::BitAnd | Self::BitXor | Self::SwapBits)
    }
}

impl AtomicKind {
    /// The operation with libfabric's codes, if it is offered.
    pub(crate) fn new(class: AtomicClass, datatype: c_int, op: c_int) -> Result<Self> {
        let kind = Datatype::new(datatype).zip(AtomicOp::new(op));
        let kind = kind.filter(|(datatype, op)| {
            op.is_of_class(class) && !(op.is_bitwise() && datatype.is_float())
        });
        let (datatype, op) = kind.ok_or(FiError(FI_EOPNOTSUPP))?;
        Ok(Self { op, datatype, class })
    }

    /// The maximum number of elements.
    pub(crate) fn max_count(self) -> usize {
        MAX_ATOMIC_BYTES / self.datatype.size()
    }

    /// The rights that the operation needs.
    pub(crate) fn rights(self) -> Rights {
        match (self.op, self.class) {
            (AtomicOp::Read, _) => Rights::READ,
            (_, AtomicClass::Write) => Rights::WRITE,
            _ => Rights::READ_WRITE,
        }
    }

    /// Whether the operation has operands.
    pub(crate) fn has_operands(self) -> bool {
        self.op != AtomicOp::Read
    }

    /// The number of bytes that the owner returns for this number of bytes of memory.
    pub(crate) fn result_bytes(self, bytes: usize) -> usize {
        if self.class == AtomicClass::Write { 0 } else { bytes }
    }

    /// The number of bytes that an initiator sends for this number of bytes of memory.
    pub(crate) fn operand_bytes(self, bytes: usize) -> usize {
        match self.class {
            AtomicClass::Compare => 2 * bytes,
            _ if self.has_operands() => bytes,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_meaningful_operations_are_offered() {
        let is_offered = |class, datatype, op| AtomicKind::new(class, datatype, op).is_ok();
        for datatype in FI_INT8..=FI_DOUBLE {
            let is_float = datatype >= FI_FLOAT;
            for op in FI_MIN..=FI_MSWAP {
                let compares = op >= FI_CSWAP;
                let fits = !(is_float && [FI_BOR, FI_BAND, FI_BXOR, FI_MSWAP].contains(&op));
                let write = is_offered(AtomicClass::Write, datatype, op);
                assert_eq!(write, fits && !compares && op != FI_ATOMIC_READ);
                assert_eq!(is_offered(AtomicClass::Fetch, datatype, op), fits && !compares);
                assert_eq!(is_offered(AtomicClass::Compare, datatype, op), fits && compares);
            }
        }
        for datatype in [-1, FI_FLOAT_COMPLEX, FI_LONG_DOUBLE, FI_LONG_DOUBLE_COMPLEX, 14, 99] {
            assert!(!is_offered(AtomicClass::Write, datatype, FI_SUM));
        }
        assert!(!is_offered(AtomicClass::Compare, FI_INT32, FI_MSWAP + 1));
        assert!(!is_offered(AtomicClass::Write, FI_INT32, -1));
    }
}
