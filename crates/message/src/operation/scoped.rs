//! Messages over borrowed memory, inside a scope that cannot be left before they are over.

use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use memferry_sys::sync::lock;

use super::Operation;
use crate::error::Error;
use crate::pieces::Piece;
use crate::port::{Begun, Peer, Port, Received};
use crate::wire::Number;
use crate::{IntoPieces, IntoPiecesMut, RemoteWindow, Source, ValidationError};

/// Begins messages over memory that lives at least as long as `'scope`.
pub struct Scope<'scope, 'env: 'scope> {
    port: &'scope Arc<Port>,
    /// What was begun, and whether it may be taken back at the end.
    begun: Mutex<Vec<(Number, bool)>>,
    /// Invariant, so that `'scope` can neither shrink nor grow.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl std::fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("port", self.port).finish_non_exhaustive()
    }
}

/// Runs `f` with a scope; at the end, cancels receives that no message has met, and waits for
/// everything else: also for a stopped peer that may still write to borrowed memory.
pub(crate) fn scope<'env, R>(
    port: &Arc<Port>,
    f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R,
) -> R {
    let scope = Scope { port, begun: Mutex::default(), scope: PhantomData, env: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
    if port.check_fork().is_ok() {
        for (number, is_receive) in lock(&scope.begun).drain(..) {
            if is_receive {
                port.enter().cancel(number);
            }
            port.block(true, None, |state| state.operations.is_over(number).then_some(()));
        }
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

impl<'scope> Scope<'scope, '_> {
    /// Begins sending a buffer, or several pieces as one message.
    pub fn isend(
        &'scope self,
        to: Peer,
        tag: u64,
        buffer: impl IntoPieces<'scope>,
    ) -> Result<ScopedOperation<'scope>, Error> {
        let pieces = buffer.into_pieces();
        // SAFETY: the memory is borrowed for `'scope`, which does not end before the message.
        self.begin(unsafe { self.port.begin_send(to, tag, pieces.as_slice()) }?, false)
    }

    /// Begins receiving into a buffer, or into several pieces.
    pub fn irecv(
        &'scope self,
        from: impl Into<Source>,
        tag: u64,
        mask: u64,
        buffer: impl IntoPiecesMut<'scope>,
    ) -> Result<ScopedOperation<'scope>, Error> {
        let pieces = buffer.into_pieces_mut();
        let pieces: &[Piece] = pieces.as_slice();
        // SAFETY: as above, and the borrow is exclusive.
        self.begin(unsafe { self.port.begin_receive(from.into(), tag, mask, pieces) }?, true)
    }

    /// Begins a put of borrowed memory to a window.
    pub fn iput(
        &'scope self,
        window: &RemoteWindow,
        offset: u64,
        data: &'scope [u8],
    ) -> Result<ScopedOperation<'scope>, Error> {
        self.check_port(window)?;
        // SAFETY: the memory is borrowed for `'scope`, which does not end before the access.
        self.begin(unsafe { window.begin_put(offset, data.as_ptr(), data.len(), None) }?, false)
    }

    /// Begins a get from a window into borrowed memory.
    pub fn iget(
        &'scope self,
        window: &RemoteWindow,
        offset: u64,
        buffer: &'scope mut [u8],
    ) -> Result<ScopedOperation<'scope>, Error> {
        self.check_port(window)?;
        // SAFETY: as above.
        self.begin(unsafe { window.begin_get(offset, buffer.as_mut_ptr(), buffer.len()) }?, false)
    }

    /// A scope waits for what its own endpoint or link does.
    fn check_port(&self, window: &RemoteWindow) -> Result<(), Error> {
        let is_own = Arc::ptr_eq(self.port, &window.port);
        if is_own { Ok(()) } else { Err(ValidationError::UnknownPeer.into()) }
    }

    fn begin(
        &'scope self,
        begun: Begun,
        is_receive: bool,
    ) -> Result<ScopedOperation<'scope>, Error> {
        if let Begun::Underway(number) = begun {
            let mut kept = lock(&self.begun);
            // A scope that lives long should not gather what is over.
            if kept.len() == kept.capacity() {
                let mut all = std::mem::take(&mut *kept);
                drop(kept);
                let mut state = self.port.enter();
                all.retain(|(number, _)| !state.operations.is_over(*number));
                drop(state);
                kept = lock(&self.begun);
                kept.append(&mut all);
            }
            kept.push((number, is_receive));
        }
        let operation = Operation::new(self.port, begun);
        Ok(ScopedOperation { operation, scope: PhantomData })
    }
}

/// A message over borrowed memory.
#[derive(Debug)]
pub struct ScopedOperation<'scope> {
    operation: Operation,
    scope: PhantomData<&'scope mut [u8]>,
}

impl ScopedOperation<'_> {
    /// Whether it is over, and how it ended; moves messages on.
    pub fn test(&mut self) -> Option<Result<Received, Error>> {
        self.operation.test()
    }

    /// Waits for the end.
    pub fn wait(&mut self) -> Result<Received, Error> {
        self.operation.wait()
    }

    /// The operation: to cancel, for an eventfd, to wait for any.
    pub fn operation(&mut self) -> &mut Operation {
        &mut self.operation
    }
}

impl Future for ScopedOperation<'_> {
    type Output = Result<Received, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.operation).poll(context)
    }
}
