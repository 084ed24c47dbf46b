//! The calls for atomic operations.

use std::ffi::{c_int, c_void};

use memferry_message::Segment;

use super::Endpoint;
use super::atomic::AtomicCall;
use super::rma::RmaTarget;
use super::send::IovList;
use crate::abi::*;
use crate::atomic::{AtomicClass, AtomicKind};
use crate::guard::{FiError, Result, call, transfer};
use crate::object;

pub(super) static OPS: OpsAtomic = OpsAtomic {
    size: size_of::<OpsAtomic>(),
    write,
    writev,
    writemsg,
    inject,
    readwrite,
    readwritev,
    readwritemsg,
    compwrite,
    compwritev,
    compwritemsg,
    writevalid,
    readwritevalid,
    compwritevalid,
};

/// The size of an element; 1 for a type that is not offered, which is refused later.
fn element_bytes(class: AtomicClass, datatype: c_int, op: c_int) -> usize {
    AtomicKind::new(class, datatype, op).map_or(1, |kind| kind.datatype.size())
}

/// The arguments of a call with vectors.
#[derive(Clone, Copy)]
struct AtomicVectors {
    operands: (*const Ioc, usize),
    compare: (*const Ioc, usize),
    results: (*mut Ioc, usize),
}

/// No vector.
const NONE: (*const Ioc, usize) = (std::ptr::null(), 0);
const NO_RESULTS: (*mut Ioc, usize) = (std::ptr::null_mut(), 0);

/// What all calls name.
#[derive(Clone, Copy)]
struct AtomicArguments {
    class: AtomicClass,
    datatype: c_int,
    op: c_int,
    target: RmaTarget,
    context: *mut c_void,
}

/// # Safety
/// libfabric's contract: an open endpoint, vectors and memory that stay valid until completion.
unsafe fn start(
    ep: *mut FidEp,
    arguments: AtomicArguments,
    vectors: AtomicVectors,
    flags: Option<u64>,
    is_injected: bool,
) -> isize {
    // SAFETY: the caller guarantees it.
    transfer(|| unsafe {
        let endpoint: &Endpoint = object::borrow(ep);
        let AtomicArguments { class, datatype, op, target, context } = arguments;
        let size = element_bytes(class, datatype, op);
        // A read ignores its operands.
        let operands = if op == FI_ATOMIC_READ { NONE } else { vectors.operands };
        let operands = IovList::of_elements(operands.0, operands.1, size)?;
        let compare = IovList::of_elements(vectors.compare.0, vectors.compare.1, size)?;
        let results = IovList::of_elements(vectors.results.0, vectors.results.1, size)?;
        endpoint.atomic(&AtomicCall {
            class,
            datatype,
            op,
            target,
            operands: operands.as_slice(),
            compare: compare.as_slice(),
            results: results.as_slice(),
            context,
            flags: flags.unwrap_or_else(|| endpoint.send_flags()),
            is_injected,
        })
    })
}

/// # Safety
/// As for [`start`], with a description.
unsafe fn start_message(
    ep: *mut FidEp,
    message: *const MsgAtomic,
    class: AtomicClass,
    compare: (*const Ioc, usize),
    results: (*mut Ioc, usize),
    flags: u64,
) -> isize {
    // SAFETY: the caller guarantees it.
    unsafe {
        let described = described(message, class, results);
        match described {
            Ok((arguments, operands)) => {
                let vectors = AtomicVectors { operands, compare, results };
                start(ep, arguments, vectors, Some(flags), false)
            }
            Err(FiError(code)) => -(code as isize),
        }
    }
}

/// The arguments in a description, whose counts must agree.
///
/// # Safety
/// The description must be valid, or null.
unsafe fn described(
    message: *const MsgAtomic,
    class: AtomicClass,
    results: (*mut Ioc, usize),
) -> Result<(AtomicArguments, (*const Ioc, usize))> {
    // SAFETY: the caller guarantees it.
    unsafe {
        let message = message.as_ref().ok_or(FiError(FI_EINVAL))?;
        let remote = message.rma_iov.as_ref().filter(|_| message.rma_iov_count == 1);
        let remote = remote.ok_or(FiError(FI_EINVAL))?;
        let (datatype, op) = (message.datatype, message.op);
        let size = element_bytes(class, datatype, op);
        let operands = (message.msg_iov, message.iov_count);
        let local =
            if op == FI_ATOMIC_READ { (results.0.cast_const(), results.1) } else { operands };
        let local = IovList::of_elements(local.0, local.1, size)?;
        let bytes = local.as_slice().iter().map(|s: &Segment| s.length as u128).sum::<u128>();
        if bytes != remote.count as u128 * size as u128 {
            return Err(FiError(FI_EINVAL));
        }
        let target = RmaTarget { peer: message.addr, address: remote.addr, key: remote.key };
        let context = message.context;
        Ok((AtomicArguments { class, datatype, op, target, context }, operands))
    }
}

/// A vector of one element.
fn one(address: *const c_void, count: usize) -> Ioc {
    Ioc { addr: address.cast_mut(), count }
}

unsafe extern "C" fn write(
    ep: *mut FidEp,
    buffer: *const c_void,
    count: usize,
    _desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let (class, target) = (AtomicClass::Write, RmaTarget { peer, address, key });
    let operand = one(buffer, count);
    let operands = (&raw const operand, 1);
    let vectors = AtomicVectors { operands, compare: NONE, results: NO_RESULTS };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe {
        start(ep, AtomicArguments { class, datatype, op, target, context }, vectors, None, false)
    }
}

unsafe extern "C" fn writev(
    ep: *mut FidEp,
    vectors: *const Ioc,
    _desc: *mut *mut c_void,
    count: usize,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let (class, target) = (AtomicClass::Write, RmaTarget { peer, address, key });
    let vectors = AtomicVectors { operands: (vectors, count), compare: NONE, results: NO_RESULTS };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe {
        start(ep, AtomicArguments { class, datatype, op, target, context }, vectors, None, false)
    }
}

unsafe extern "C" fn writemsg(ep: *mut FidEp, message: *const MsgAtomic, flags: u64) -> isize {
    // SAFETY: libfabric's contract, which `start_message` requires.
    unsafe { start_message(ep, message, AtomicClass::Write, NONE, NO_RESULTS, flags) }
}

unsafe extern "C" fn inject(
    ep: *mut FidEp,
    buffer: *const c_void,
    count: usize,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
) -> isize {
    let (class, target) = (AtomicClass::Write, RmaTarget { peer, address, key });
    let (operand, context) = (one(buffer, count), std::ptr::null_mut());
    let operands = (&raw const operand, 1);
    let vectors = AtomicVectors { operands, compare: NONE, results: NO_RESULTS };
    let arguments = AtomicArguments { class, datatype, op, target, context };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe { start(ep, arguments, vectors, Some(0), true) }
}

unsafe extern "C" fn readwrite(
    ep: *mut FidEp,
    buffer: *const c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let (class, target) = (AtomicClass::Fetch, RmaTarget { peer, address, key });
    let (operand, mut result) = (one(buffer, count), one(result, count));
    let (operands, results) = ((&raw const operand, 1), (&raw mut result, 1));
    let vectors = AtomicVectors { operands, compare: NONE, results };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe {
        start(ep, AtomicArguments { class, datatype, op, target, context }, vectors, None, false)
    }
}

unsafe extern "C" fn readwritev(
    ep: *mut FidEp,
    vectors: *const Ioc,
    _desc: *mut *mut c_void,
    count: usize,
    results: *mut Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let (class, target) = (AtomicClass::Fetch, RmaTarget { peer, address, key });
    let (operands, results) = ((vectors, count), (results, result_count));
    let vectors = AtomicVectors { operands, compare: NONE, results };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe {
        start(ep, AtomicArguments { class, datatype, op, target, context }, vectors, None, false)
    }
}

unsafe extern "C" fn readwritemsg(
    ep: *mut FidEp,
    message: *const MsgAtomic,
    results: *mut Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    let results = (results, result_count);
    // SAFETY: libfabric's contract, which `start_message` requires.
    unsafe { start_message(ep, message, AtomicClass::Fetch, NONE, results, flags) }
}

unsafe extern "C" fn compwrite(
    ep: *mut FidEp,
    buffer: *const c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *const c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let (class, target) = (AtomicClass::Compare, RmaTarget { peer, address, key });
    let (operand, compare) = (one(buffer, count), one(compare, count));
    let mut result = one(result, count);
    let vectors = AtomicVectors {
        operands: (&raw const operand, 1),
        compare: (&raw const compare, 1),
        results: (&raw mut result, 1),
    };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe {
        start(ep, AtomicArguments { class, datatype, op, target, context }, vectors, None, false)
    }
}

unsafe extern "C" fn compwritev(
    ep: *mut FidEp,
    vectors: *const Ioc,
    _desc: *mut *mut c_void,
    count: usize,
    compare: *const Ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    results: *mut Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    peer: u64,
    address: u64,
    key: u64,
    datatype: c_int,
    op: c_int,
    context: *mut c_void,
) -> isize {
    let (class, target) = (AtomicClass::Compare, RmaTarget { peer, address, key });
    let vectors = AtomicVectors {
        operands: (vectors, count),
        compare: (compare, compare_count),
        results: (results, result_count),
    };
    // SAFETY: libfabric's contract, which `start` requires.
    unsafe {
        start(ep, AtomicArguments { class, datatype, op, target, context }, vectors, None, false)
    }
}

unsafe extern "C" fn compwritemsg(
    ep: *mut FidEp,
    message: *const MsgAtomic,
    compare: *const Ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    results: *mut Ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    let (compare, results) = ((compare, compare_count), (results, result_count));
    // SAFETY: libfabric's contract, which `start_message` requires.
    unsafe { start_message(ep, message, AtomicClass::Compare, compare, results, flags) }
}

/// Stores the maximum number of elements of an operation that is offered.
///
/// # Safety
/// There must be space for a number, or null.
unsafe fn check(class: AtomicClass, datatype: c_int, op: c_int, count: *mut usize) -> c_int {
    call(|| {
        let kind = AtomicKind::new(class, datatype, op)?;
        // SAFETY: the caller guarantees it.
        let count = unsafe { count.as_mut() }.ok_or(FiError(FI_EINVAL))?;
        *count = kind.max_count();
        Ok(())
    })
}

unsafe extern "C" fn writevalid(
    _: *mut FidEp,
    datatype: c_int,
    op: c_int,
    count: *mut usize,
) -> c_int {
    // SAFETY: libfabric's contract: space for a number.
    unsafe { check(AtomicClass::Write, datatype, op, count) }
}

unsafe extern "C" fn readwritevalid(
    _: *mut FidEp,
    datatype: c_int,
    op: c_int,
    count: *mut usize,
) -> c_int {
    // SAFETY: libfabric's contract: space for a number.
    unsafe { check(AtomicClass::Fetch, datatype, op, count) }
}

unsafe extern "C" fn compwritevalid(
    _: *mut FidEp,
    datatype: c_int,
    op: c_int,
    count: *mut usize,
) -> c_int {
    // SAFETY: libfabric's contract: space for a number.
    unsafe { check(AtomicClass::Compare, datatype, op, count) }
}

/// The limits of an operation, if it is offered.
pub(crate) unsafe extern "C" fn query_atomic(
    _domain: *mut FidDomain,
    datatype: c_int,
    op: c_int,
    attr: *mut AtomicAttr,
    flags: u64,
) -> c_int {
    call(|| {
        let class = match flags {
            0 => AtomicClass::Write,
            FI_FETCH_ATOMIC => AtomicClass::Fetch,
            FI_COMPARE_ATOMIC => AtomicClass::Compare,
            _ => return Err(FiError(FI_EINVAL)),
        };
        let kind = AtomicKind::new(class, datatype, op)?;
        // SAFETY: libfabric's contract: space for the attributes.
        let attr = unsafe { attr.as_mut() }.ok_or(FiError(FI_EINVAL))?;
        *attr = AtomicAttr { count: kind.max_count(), size: kind.datatype.size() };
        Ok(())
    })
}
