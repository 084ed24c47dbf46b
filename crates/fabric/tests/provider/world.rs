//! The fixtures of the tests: objects with safe calls, which close themselves.
//!
//! The memory of messages in flight belongs to the test, which keeps it until the completion.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use memferry_fi::abi::*;
use memferry_fi::fi_prov_ini;

pub(crate) const VERSION: u32 = (1 << 16) | 17;
const TIMEOUT: Duration = Duration::from_secs(60);

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

/// An endpoint, with the objects that are bound to it.
pub(crate) struct Side {
    pub(crate) ep: *mut FidEp,
    pub(crate) queue: *mut FidCq,
    pub(crate) vector: *mut FidAv,
    /// Objects that are closed with the endpoint.
    pub(crate) more: Vec<*mut Fid>,
}

impl Drop for Side {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let all = [self.ep.cast(), self.queue.cast(), self.vector.cast()];
            all.iter().chain(&self.more).for_each(|fid| assert_eq!(close(*fid), 0));
        }
    }
}

/// The context of an operation: an arbitrary number.
pub(crate) fn context(number: usize) -> *mut c_void {
    number as *mut c_void
}

/// The vector of a message with one segment.
pub(crate) fn vector(buffer: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }
}

pub(crate) fn tagged_message(iov: Option<&libc::iovec>, tag: u64, number: usize) -> MsgTagged {
    MsgTagged {
        msg_iov: iov.map_or(null(), |iov| &raw const *iov),
        desc: null_mut(),
        iov_count: usize::from(iov.is_some()),
        addr: 0,
        tag,
        ignore: 0,
        context: context(number),
        data: 0,
    }
}

pub(crate) fn plain_message(iov: &libc::iovec, number: usize) -> Msg {
    let (desc, context) = (null_mut(), context(number));
    Msg { msg_iov: &raw const *iov, desc, iov_count: 1, addr: 0, context, data: 0 }
}

impl Side {
    pub(crate) fn enable(&self) {
        assert_eq!(control(self.ep.cast(), FI_ENABLE, &mut 0u64), 0);
    }

    fn tagged(&self) -> &OpsTagged {
        // SAFETY: the endpoint is open.
        unsafe { &*(*self.ep).tagged }
    }

    fn plain(&self) -> &OpsMessage {
        // SAFETY: the endpoint is open.
        unsafe { &*(*self.ep).msg }
    }

    pub(crate) fn name(&self) -> Name {
        let (mut name, mut length) = ([0; 64], 64);
        // SAFETY: the endpoint is open; the length is that of the memory.
        let code = unsafe {
            ((*(*self.ep).cm).getname)(self.ep.cast(), name.as_mut_ptr().cast(), &raw mut length)
        };
        assert_eq!((code, length), (0, 64));
        name
    }

    /// Inserts an address, and returns its number.
    pub(crate) fn insert(&self, name: &Name) -> u64 {
        let mut number = 0;
        // SAFETY: the vector is open; there is one address, and space for a number.
        let inserted = unsafe {
            let insert = (*(*self.vector).ops).insert;
            insert(self.vector, name.as_ptr().cast(), 1, &raw mut number, 0, null_mut())
        };
        assert_eq!(inserted, 1);
        number
    }

    pub(crate) fn tsend(&self, bytes: &[u8], to: u64, tag: u64, number: usize) -> isize {
        let (at, length) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.tagged().send)(self.ep, at, length, null_mut(), to, tag, context(number)) }
    }

    pub(crate) fn tsenddata(&self, bytes: &[u8], data: u64, tag: u64, number: usize) -> isize {
        let (at, length) = (bytes.as_ptr().cast(), bytes.len());
        let context = context(number);
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.tagged().senddata)(self.ep, at, length, null_mut(), data, 0, tag, context) }
    }

    pub(crate) fn tsendmsg(&self, message: &MsgTagged, flags: u64) -> isize {
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.tagged().sendmsg)(self.ep, &raw const *message, flags) }
    }

    pub(crate) fn tsendv(&self, iov: &[libc::iovec], tag: u64, number: usize) -> isize {
        let (at, count) = (iov.as_ptr(), iov.len());
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.tagged().sendv)(self.ep, at, null_mut(), count, 0, tag, context(number)) }
    }

    pub(crate) fn tinject(&self, bytes: &[u8], tag: u64) -> isize {
        // SAFETY: the endpoint is open.
        unsafe { (self.tagged().inject)(self.ep, bytes.as_ptr().cast(), bytes.len(), 0, tag) }
    }

    pub(crate) fn tinjectdata(&self, bytes: &[u8], data: u64, tag: u64) -> isize {
        let at = bytes.as_ptr().cast();
        // SAFETY: the endpoint is open.
        unsafe { (self.tagged().injectdata)(self.ep, at, bytes.len(), data, 0, tag) }
    }

    pub(crate) fn trecv(&self, buffer: &mut [u8], tag: u64, ignored: u64, number: usize) -> isize {
        self.trecv_from(buffer, FI_ADDR_UNSPEC, tag, ignored, number)
    }

    pub(crate) fn trecv_from(
        &self,
        buffer: &mut [u8],
        from: u64,
        tag: u64,
        ignored: u64,
        number: usize,
    ) -> isize {
        let (at, length, context) = (buffer.as_mut_ptr().cast(), buffer.len(), context(number));
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe {
            (self.tagged().recv)(self.ep, at, length, null_mut(), from, tag, ignored, context)
        }
    }

    pub(crate) fn trecvv(&self, iov: &[libc::iovec], tag: u64, number: usize) -> isize {
        let (at, count, context) = (iov.as_ptr(), iov.len(), context(number));
        let (from, recvv) = (FI_ADDR_UNSPEC, self.tagged().recvv);
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { recvv(self.ep, at, null_mut(), count, from, tag, 0, context) }
    }

    pub(crate) fn trecvmsg(&self, message: &MsgTagged, flags: u64) -> isize {
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.tagged().recvmsg)(self.ep, &raw const *message, flags) }
    }

    pub(crate) fn send(&self, bytes: &[u8], number: usize) -> isize {
        let (at, length) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().send)(self.ep, at, length, null_mut(), 0, context(number)) }
    }

    pub(crate) fn senddata(&self, bytes: &[u8], data: u64, number: usize) -> isize {
        let (at, length) = (bytes.as_ptr().cast(), bytes.len());
        let context = context(number);
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().senddata)(self.ep, at, length, null_mut(), data, 0, context) }
    }

    pub(crate) fn sendv(&self, iov: &[libc::iovec], number: usize) -> isize {
        let (at, count) = (iov.as_ptr(), iov.len());
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().sendv)(self.ep, at, null_mut(), count, 0, context(number)) }
    }

    pub(crate) fn sendmsg(&self, message: &Msg, flags: u64) -> isize {
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().sendmsg)(self.ep, &raw const *message, flags) }
    }

    pub(crate) fn inject(&self, bytes: &[u8]) -> isize {
        // SAFETY: the endpoint is open.
        unsafe { (self.plain().inject)(self.ep, bytes.as_ptr().cast(), bytes.len(), 0) }
    }

    pub(crate) fn injectdata(&self, bytes: &[u8], data: u64) -> isize {
        let at = bytes.as_ptr().cast();
        // SAFETY: the endpoint is open.
        unsafe { (self.plain().injectdata)(self.ep, at, bytes.len(), data, 0) }
    }

    pub(crate) fn recv(&self, buffer: &mut [u8], number: usize) -> isize {
        let (at, length, context) = (buffer.as_mut_ptr().cast(), buffer.len(), context(number));
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().recv)(self.ep, at, length, null_mut(), FI_ADDR_UNSPEC, context) }
    }

    pub(crate) fn recvv(&self, iov: &[libc::iovec], number: usize) -> isize {
        let (at, count, context) = (iov.as_ptr(), iov.len(), context(number));
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().recvv)(self.ep, at, null_mut(), count, FI_ADDR_UNSPEC, context) }
    }

    pub(crate) fn recvmsg(&self, message: &Msg, flags: u64) -> isize {
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.plain().recvmsg)(self.ep, &raw const *message, flags) }
    }

    pub(crate) fn cancel(&self, number: usize) -> isize {
        // SAFETY: the endpoint is open.
        unsafe { ((*(*self.ep).ops).cancel)(self.ep.cast(), context(number)) }
    }

    /// Reads an entry if there is one: a tagged entry with its sender.
    pub(crate) fn try_read(&self) -> Result<(CqTaggedEntry, u64), c_int> {
        read_one(self.queue)
    }

    /// Waits for the next entry.
    pub(crate) fn read(&self) -> CqTaggedEntry {
        self.read_from().0
    }

    /// Waits for the next entry, and returns it with its sender.
    pub(crate) fn read_from(&self) -> (CqTaggedEntry, u64) {
        let end = Instant::now() + TIMEOUT;
        loop {
            match self.try_read() {
                Ok(read) => return read,
                Err(code) => assert_eq!(code, -FI_EAGAIN, "an entry is expected"),
            }
            assert!(Instant::now() < end, "nothing comes");
            std::thread::yield_now();
        }
    }

    /// Waits for the next entry, which must be an error.
    pub(crate) fn read_error(&self) -> CqErrEntry {
        let end = Instant::now() + TIMEOUT;
        loop {
            match self.try_read() {
                Err(code) if code == -FI_EAVAIL => return take_error(self.queue).unwrap(),
                Err(code) => assert_eq!(code, -FI_EAGAIN, "an error is expected"),
                Ok(entry) => panic!("an error is expected, not {entry:?}"),
            }
            assert!(Instant::now() < end, "nothing comes");
            std::thread::yield_now();
        }
    }

    /// Makes progress for 30 ms, during which nothing may complete.
    pub(crate) fn expect_nothing(&self) {
        let end = Instant::now() + Duration::from_millis(30);
        while Instant::now() < end {
            assert_eq!(self.try_read().map(|read| read.0.flags), Err(-FI_EAGAIN));
        }
    }
}

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
