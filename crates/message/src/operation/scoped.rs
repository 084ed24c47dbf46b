//! Operations on borrowed memory, in a scope that ends only after they are complete.

use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::sync::lock;

use super::Operation;
use crate::control::OperationId;
use crate::error::Error;
use crate::port::{MessageStatus, Peer, Port, Started};
use crate::segments::Segment;
use crate::{IntoSegments, IntoSegmentsMut, RemoteWindow, Source, ValidationError};

/// Starts operations on memory that lives at least as long as `'scope`.
///
/// ```
/// use memferry::message::{Endpoint, TAG_ALL};
///
/// let endpoint = Endpoint::open("doc-scope")?;
/// let own = endpoint.self_peer()?;
/// let mut buffer = [0; 5];
/// endpoint.scope(|scope| {
///     let mut receive = scope.irecv(own, 1, TAG_ALL, &mut buffer)?;
///     scope.isend(own, 1, b"hello")?;
///     receive.wait()
/// })?;
/// assert_eq!(&buffer, b"hello");
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub struct OperationScope<'scope, 'env: 'scope> {
    port: &'scope Arc<Port>,
    /// The operations that were started, and whether each of them is cancelled at the end.
    started: Mutex<Vec<(OperationId, bool)>>,
    /// Invariant, so that `'scope` can neither shrink nor grow.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl std::fmt::Debug for OperationScope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OperationScope").field("port", self.port).finish_non_exhaustive()
    }
}

/// Runs `f` with a scope. At the end, cancels receives that no message has matched, and waits for
/// all operations, also for a stopped peer that may still write to borrowed memory.
pub(crate) fn scope<'env, R>(
    port: &Arc<Port>,
    f: impl for<'scope> FnOnce(&'scope OperationScope<'scope, 'env>) -> R,
) -> R {
    let scope =
        OperationScope { port, started: Mutex::default(), scope: PhantomData, env: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
    if port.check_fork().is_ok() {
        for (number, is_receive) in lock(&scope.started).drain(..) {
            if is_receive {
                port.lock().protocol.cancel(number);
            }
            port.block(true, None, |state| {
                state.protocol.operations.is_complete(number).then_some(())
            });
        }
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

impl<'scope> OperationScope<'scope, '_> {
    /// Starts a send of a buffer, or of several segments as one message.
    pub fn isend(
        &'scope self,
        to: Peer,
        tag: u64,
        buffer: impl IntoSegments<'scope>,
    ) -> Result<ScopedOperation<'scope>, Error> {
        let pieces = buffer.into_segments();
        // SAFETY: the memory is borrowed for `'scope`, which ends only after the operation.
        self.start(unsafe { self.port.start_send(to, tag, pieces.as_slice()) }?, false)
    }

    /// Starts a receive into a buffer, or into several segments.
    pub fn irecv(
        &'scope self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        buffer: impl IntoSegmentsMut<'scope>,
    ) -> Result<ScopedOperation<'scope>, Error> {
        let pieces = buffer.into_segments_mut();
        let pieces: &[Segment] = pieces.as_slice();
        // SAFETY: as above, and the borrow is exclusive.
        self.start(unsafe { self.port.start_receive(from.into(), tag, mask, pieces) }?, true)
    }

    /// Starts a put of borrowed memory to a window.
    pub fn iput(
        &'scope self,
        window: &RemoteWindow,
        offset: u64,
        data: &'scope [u8],
    ) -> Result<ScopedOperation<'scope>, Error> {
        self.check_port(window)?;
        // SAFETY: the memory is borrowed for `'scope`, which ends only after the access.
        self.start(unsafe { window.begin_put(offset, data.as_ptr(), data.len(), None) }?, false)
    }

    /// Starts a get from a window into borrowed memory.
    pub fn iget(
        &'scope self,
        window: &RemoteWindow,
        offset: u64,
        buffer: &'scope mut [u8],
    ) -> Result<ScopedOperation<'scope>, Error> {
        self.check_port(window)?;
        // SAFETY: as above.
        self.start(unsafe { window.begin_get(offset, buffer.as_mut_ptr(), buffer.len()) }?, false)
    }

    /// Fails if the window belongs to another endpoint or link: a scope waits for operations of its
    /// own only.
    fn check_port(&self, window: &RemoteWindow) -> Result<(), Error> {
        let is_own = Arc::ptr_eq(self.port, &window.port);
        if is_own { Ok(()) } else { Err(ValidationError::UnknownPeer.into()) }
    }

    fn start(
        &'scope self,
        begun: Started,
        is_receive: bool,
    ) -> Result<ScopedOperation<'scope>, Error> {
        if let Started::Pending(number) = begun {
            let mut kept = lock(&self.started);
            // A long scope must not accumulate completed operations.
            if kept.len() == kept.capacity() {
                let mut all = std::mem::take(&mut *kept);
                drop(kept);
                let mut state = self.port.lock();
                all.retain(|(number, _)| !state.protocol.operations.is_complete(*number));
                drop(state);
                kept = lock(&self.started);
                kept.append(&mut all);
            }
            kept.push((number, is_receive));
        }
        let operation = Operation::new(self.port, begun);
        Ok(ScopedOperation { operation, scope: PhantomData })
    }
}

/// An operation on borrowed memory.
///
/// ```
/// use memferry::message::{Error, MessageStatus, ScopedOperation};
///
/// fn all(operations: &mut [ScopedOperation<'_>]) -> Result<Vec<MessageStatus>, Error> {
///     operations.iter_mut().map(|operation| operation.wait()).collect()
/// }
/// ```
#[derive(Debug)]
pub struct ScopedOperation<'scope> {
    operation: Operation,
    scope: PhantomData<&'scope mut [u8]>,
}

impl ScopedOperation<'_> {
    /// Makes progress, and returns the result if the operation is complete.
    pub fn test(&mut self) -> Option<Result<MessageStatus, Error>> {
        self.operation.test()
    }

    /// Makes progress, and returns whether the operation is complete, failed ones included.
    pub fn is_done(&mut self) -> bool {
        self.operation.is_done()
    }

    /// Waits for the completion.
    pub fn wait(&mut self) -> Result<MessageStatus, Error> {
        self.operation.wait()
    }

    /// Waits for the completion, at most `timeout`; `None` if the operation is not complete then.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<MessageStatus, Error>> {
        self.operation.wait_timeout(timeout)
    }

    /// Cancels the operation, as [`Operation::cancel`] does.
    pub fn cancel(&self) {
        self.operation.cancel();
    }

    /// A descriptor that becomes readable on completion, as [`Operation::event`] returns it.
    pub fn event(&self) -> Result<Arc<EventFd>, Error> {
        self.operation.event()
    }

    /// The operation without the memory, for [`Operation::wait_any`].
    pub fn operation(&mut self) -> &mut Operation {
        &mut self.operation
    }
}

impl Future for ScopedOperation<'_> {
    type Output = Result<MessageStatus, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.operation).poll(context)
    }
}
