//! One endpoint with all that it needs, and the calls of a test on it.

use super::*;

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
