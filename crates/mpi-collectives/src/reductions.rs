//! Reductions of predefined datatypes by predefined operations. MPI requires both to be equal at all
//! ranks, so that all ranks decide in the same way.

use std::ffi::{c_int, c_void};

use crate::communicator::Context;
use crate::handles::{Class, Datatype, Operation};
use crate::library::{Handle, Library};
use crate::moves::root_of;
use crate::packing::MAX_BYTES;
use crate::team::{self, ElementType, ReduceOp};

/// Arguments that all reductions have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reduction {
    pub(crate) from: *const c_void,
    pub(crate) to: *mut c_void,
    pub(crate) count: i64,
    pub(crate) datatype: Handle,
    pub(crate) operation: Handle,
}

/// What a team reduces: `count` elements of a type by an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    element: ElementType,
    operation: ReduceOp,
    count: usize,
}

impl Reduction {
    /// How the team executes the reduction, or `None` if it is to be passed on.
    #[inline]
    fn plan(&self, context: &Context) -> Option<Plan> {
        let datatype = context.handles.datatype(context.library.handle(self.datatype))?;
        let operation = context.handles.operation(context.library.handle(self.operation))?;
        let count = usize::try_from(self.count).ok()?;
        let bytes = count.checked_mul(datatype.size)?;
        let plan = plan(datatype, operation, count)?;
        (1..=MAX_BYTES).contains(&bytes).then_some(plan)
    }
}

/// The plan for a datatype and an operation; `None` if MPI does not define it or a team does not have it.
fn plan(datatype: Datatype, operation: Operation, count: usize) -> Option<Plan> {
    use Operation::{
        BitAnd, BitOr, BitXor, LogicalAnd, LogicalOr, LogicalXor, Max, Min, Product, Sum,
    };
    let (class, elements) = match datatype.class {
        Class::Complex => (Class::Real, 2),
        Class::Byte | Class::Bool => (Class::Unsigned, 1),
        class => (class, 1),
    };
    let is_defined = match datatype.class {
        Class::Signed | Class::Unsigned => true,
        Class::Real => matches!(operation, Max | Min | Sum | Product),
        Class::Complex => operation == Sum,
        Class::Byte => matches!(operation, BitAnd | BitOr | BitXor),
        Class::Bool => matches!(operation, LogicalAnd | LogicalOr | LogicalXor),
        Class::Opaque => false,
    };
    let element = team::element_type(class, datatype.size / elements).filter(|_| is_defined)?;
    let operation = team::reduce_op(operation);
    Some(Plan { element, operation, count: count * elements })
}

/// # Safety
///
/// The arguments are those of a call of `MPI_Reduce`.
pub(crate) unsafe fn reduce(
    library: &'static Library,
    call: Reduction,
    root: c_int,
    comm: Handle,
) -> Option<c_int> {
    let context = &Context::of(library, comm)?;
    let root = root_of(context, root)?;
    let Plan { element, operation, count } = call.plan(context)?;
    let is_root = context.communicator.rank == root;
    let is_in_place = call.from == context.handles.in_place;
    let from = if is_in_place { call.to.cast_const() } else { call.from };
    if from.is_null() || (is_root && call.to.is_null()) {
        return None;
    }
    let to = if is_root { call.to } else { std::ptr::null_mut() };
    // SAFETY: the program passes memory for the elements.
    let done = team::run(context, |team| unsafe {
        team.reduce(root, from.cast(), to.cast(), count, (element, operation))
    });
    Some(done.err().unwrap_or(0))
}

/// # Safety
///
/// The arguments are those of a call of `MPI_Allreduce`.
#[inline]
pub(crate) unsafe fn allreduce(
    library: &'static Library,
    call: Reduction,
    comm: Handle,
) -> Option<c_int> {
    let context = &Context::of(library, comm)?;
    let Plan { element, operation, count } = call.plan(context)?;
    let is_in_place = call.from == context.handles.in_place;
    let from = if is_in_place { call.to.cast_const() } else { call.from };
    if from.is_null() || call.to.is_null() {
        return None;
    }
    // SAFETY: the program passes memory for the elements.
    let done = team::run(context, |team| unsafe {
        team.allreduce(from.cast(), call.to.cast(), count, (element, operation))
    });
    Some(done.err().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_mpi_defines_is_reduced() {
        let of = |class, size, operation| plan(Datatype { class, size }, operation, 3);
        assert_eq!(of(Class::Real, 8, Operation::Sum).unwrap().count, 3);
        assert!(of(Class::Real, 8, Operation::BitAnd).is_none());
        assert_eq!(of(Class::Complex, 16, Operation::Sum).unwrap().count, 6);
        assert!(of(Class::Complex, 16, Operation::Product).is_none());
        assert!(of(Class::Byte, 1, Operation::Max).is_none());
        assert!(of(Class::Byte, 1, Operation::BitXor).is_some());
        assert!(of(Class::Bool, 1, Operation::LogicalOr).is_some());
        assert!(of(Class::Opaque, 1, Operation::Max).is_none());
        assert!(of(Class::Real, 16, Operation::Max).is_none());
    }
}
