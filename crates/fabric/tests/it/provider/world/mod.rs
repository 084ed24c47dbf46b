//! The fixtures of the tests: objects with safe calls, which close themselves.
//!
//! The memory of messages in flight belongs to the test, which keeps it until the completion.

mod side;

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use memferry_fi::abi::*;
use memferry_fi::fi_prov_ini;
#[allow(unused_imports, reason = "each test file uses its own part")]
pub(crate) use side::{Side, context, plain_message, tagged_message, vector};

pub(crate) const VERSION: u32 = (1 << 16) | 17;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(200);

/// An info of the provider, or hints for it. It is never freed, because only libfabric's core could do so.
pub(crate) struct Offer(pub(crate) *mut Info);

impl Offer {
    /// The offer for these hints.
    pub(crate) fn for_hints(hints: Option<&Offer>) -> Result<Self, c_int> {
        Self::find(hints, None, 0)
    }

    pub(crate) fn find(
        hints: Option<&Offer>,
        service: Option<&std::ffi::CStr>,
        flags: u64,
    ) -> Result<Self, c_int> {
        let mut found = null_mut();
        let hints = hints.map_or(null(), |hints| hints.0.cast_const());
        let service = service.map_or(null(), std::ffi::CStr::as_ptr);
        // SAFETY: the provider's description is constant by now; hints are an info or null.
        let code = unsafe {
            ((*fi_prov_ini()).getinfo)(VERSION, null(), service, flags, hints, &raw mut found)
        };
        if code == 0 { Ok(Self(found)) } else { Err(code) }
    }

    /// Hints that request nothing.
    pub(crate) fn nothing() -> Self {
        let offer = Self::for_hints(None).unwrap();
        // SAFETY: the attributes exist, and zero is a valid value of all their fields.
        unsafe {
            let info = &mut *offer.0;
            (info.caps, info.mode, info.src_addr, info.src_addrlen) = (0, 0, null_mut(), 0);
            info.tx_attr.write_bytes(0, 1);
            info.rx_attr.write_bytes(0, 1);
            info.ep_attr.write_bytes(0, 1);
            info.domain_attr.write_bytes(0, 1);
            info.fabric_attr.write_bytes(0, 1);
        }
        offer
    }

    /// Changes the attributes.
    pub(crate) fn with(self, change: impl FnOnce(&mut Parts<'_>)) -> Self {
        // SAFETY: an info of the provider has all attributes, and no other code refers to this one.
        unsafe {
            let info = &mut *self.0;
            change(&mut Parts {
                tx: &mut *info.tx_attr,
                rx: &mut *info.rx_attr,
                ep: &mut *info.ep_attr,
                domain: &mut *info.domain_attr,
                fabric: &mut *info.fabric_attr,
                info,
            });
        }
        self
    }

    /// Reads the attributes.
    pub(crate) fn see<T>(&self, look: impl FnOnce(&Parts<'_>) -> T) -> T {
        let mut seen = None;
        Self(self.0).with(|parts| seen = Some(look(parts)));
        seen.unwrap()
    }
}

pub(crate) struct Parts<'a> {
    pub(crate) info: &'a mut Info,
    pub(crate) tx: &'a mut TxAttr,
    pub(crate) rx: &'a mut RxAttr,
    pub(crate) ep: &'a mut EpAttr,
    pub(crate) domain: &'a mut DomainAttr,
    pub(crate) fabric: &'a mut FabricAttr,
}

thread_local! {
    /// The open queues of this test. All sides are in one thread, so a side that waits has to make progress
    /// for all of them.
    static QUEUES: RefCell<Vec<*mut FidCq>> = const { RefCell::new(Vec::new()) };
}

/// Makes progress for all endpoints, and reads no entries.
pub(crate) fn move_all_on() {
    QUEUES.with_borrow(|queues| {
        for queue in queues {
            // SAFETY: the queue is open; nothing is written.
            unsafe { ((*(**queue).ops).read)(*queue, null_mut(), 0) };
        }
    });
}

/// Closes an object.
pub(crate) fn close(fid: *mut Fid) -> c_int {
    // SAFETY: the object is open, and the test does not use it again if it closes.
    let code = unsafe { ((*(*fid).ops).close)(fid) };
    if code == 0 {
        QUEUES.with_borrow_mut(|queues| queues.retain(|queue| queue.cast() != fid));
    }
    code
}

pub(crate) fn bind(fid: *mut Fid, to: *mut Fid, flags: u64) -> c_int {
    // SAFETY: both objects are open.
    unsafe { ((*(*fid).ops).bind)(fid, to, flags) }
}

/// Calls the control function of an object.
pub(crate) fn control<T>(fid: *mut Fid, command: c_int, argument: &mut T) -> c_int {
    // SAFETY: the object is open, and the argument has the type of the command.
    unsafe { ((*(*fid).ops).control)(fid, command, (&raw mut *argument).cast()) }
}

/// A fabric and a domain.
pub(crate) struct World {
    pub(crate) fabric: *mut FidFabric,
    pub(crate) domain: *mut FidDomain,
    pub(crate) offer: Offer,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::of(Offer::for_hints(None).unwrap())
    }

    pub(crate) fn of(offer: Offer) -> Self {
        let (mut fabric, mut domain) = (null_mut(), null_mut());
        // SAFETY: the info is the provider's, and there is space for the pointers.
        unsafe {
            let provider = &*fi_prov_ini();
            let code = (provider.fabric)((*offer.0).fabric_attr, &raw mut fabric, null_mut());
            assert_eq!(code, 0);
            let ops = &*(*fabric).ops;
            let code = (ops.domain)(fabric, offer.0, &raw mut domain, null_mut());
            assert_eq!(code, 0);
        }
        Self { fabric, domain, offer }
    }

    fn ops(&self) -> &OpsDomain {
        // SAFETY: the domain is open.
        unsafe { &*(*self.domain).ops }
    }

    pub(crate) fn vector(&self, flags: u64) -> *mut FidAv {
        // SAFETY: zero is a valid value of all fields.
        let mut attr: AvAttr = unsafe { std::mem::zeroed() };
        (attr.r#type, attr.flags) = (FI_AV_TABLE, flags);
        let mut av = null_mut();
        // SAFETY: the domain is open, and there is space for a pointer.
        let code =
            unsafe { (self.ops().av_open)(self.domain, &raw mut attr, &raw mut av, null_mut()) };
        assert_eq!(code, 0);
        av
    }

    pub(crate) fn queue(&self, format: c_int, wait: c_int) -> *mut FidCq {
        // SAFETY: zero is a valid value of all fields.
        let mut attr: CqAttr = unsafe { std::mem::zeroed() };
        (attr.size, attr.format, attr.wait_obj) = (1, format, wait);
        let mut cq = null_mut();
        // SAFETY: the domain is open, and there is space for a pointer.
        let code =
            unsafe { (self.ops().cq_open)(self.domain, &raw mut attr, &raw mut cq, null_mut()) };
        assert_eq!(code, 0);
        QUEUES.with_borrow_mut(|queues| queues.push(cq));
        cq
    }

    pub(crate) fn counter(&self) -> *mut FidCntr {
        // SAFETY: zero is a valid value of all fields.
        let mut attr: CntrAttr = unsafe { std::mem::zeroed() };
        let mut cntr = null_mut();
        // SAFETY: the domain is open, and there is space for a pointer.
        let code = unsafe {
            (self.ops().cntr_open)(self.domain, &raw mut attr, &raw mut cntr, null_mut())
        };
        assert_eq!(code, 0);
        cntr
    }

    pub(crate) fn endpoint(&self) -> *mut FidEp {
        let mut ep = null_mut();
        // SAFETY: the domain is open, and there is space for a pointer.
        let code =
            unsafe { (self.ops().endpoint)(self.domain, self.offer.0, &raw mut ep, null_mut()) };
        assert_eq!(code, 0);
        ep
    }

    /// Opens an enabled endpoint with a queue for tagged entries.
    pub(crate) fn side(&self) -> Side {
        self.side_with(FI_CQ_FORMAT_TAGGED, 0)
    }

    /// As [`World::side`], with another format and further flags for the queue.
    pub(crate) fn side_with(&self, format: c_int, flags: u64) -> Side {
        let queue = self.queue(format, FI_WAIT_FD);
        let side = Side { ep: self.endpoint(), queue, vector: self.vector(0), more: Vec::new() };
        assert_eq!(bind(side.ep.cast(), side.vector.cast(), 0), 0);
        assert_eq!(bind(side.ep.cast(), queue.cast(), FI_SEND | FI_RECV | flags), 0);
        side.enable();
        side
    }

    /// Opens two endpoints that have each other's address as number 0.
    pub(crate) fn pair(&self) -> (Side, Side) {
        let (one, two) = (self.side(), self.side());
        assert_eq!((one.insert(&two.name()), two.insert(&one.name())), (0, 0));
        (one, two)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!((close(self.domain.cast()), close(self.fabric.cast())), (0, 0));
        }
    }
}

/// The address of an endpoint.
pub(crate) type Name = [u8; 64];

/// Reads an entry of a queue for tagged entries.
pub(crate) fn read_one(queue: *mut FidCq) -> Result<(CqTaggedEntry, u64), c_int> {
    move_all_on();
    let (mut entry, mut source) = (std::mem::MaybeUninit::<CqTaggedEntry>::uninit(), 0);
    // SAFETY: the queue is open, and there is space for an entry and a sender.
    let count =
        unsafe { ((*(*queue).ops).readfrom)(queue, entry.as_mut_ptr().cast(), 1, &raw mut source) };
    // SAFETY: the entry was written if the count is one.
    if count == 1 { Ok((unsafe { entry.assume_init() }, source)) } else { Err(count as c_int) }
}

/// Reads an error entry.
pub(crate) fn take_error(queue: *mut FidCq) -> Result<CqErrEntry, c_int> {
    // SAFETY: zero is a valid value of all fields.
    let mut entry: CqErrEntry = unsafe { std::mem::zeroed() };
    // SAFETY: the queue is open, and there is space for an entry.
    let count = unsafe { ((*(*queue).ops).readerr)(queue, &raw mut entry, 0) };
    if count == 1 { Ok(entry) } else { Err(count as c_int) }
}
