//! Probes for tracers of the kernel (USDT), such as bpftrace: `docs/guide/seeing.md` has examples.
//!
//! With the feature `probes`, a probe is a no-operation instruction, and a check of one word where its arguments
//! would cost something. Without it there is nothing.
//!
//! Paths of copies are 0 inline, 1 single, 2 shared, 3 hybrid, 4 parts; those of messages 0 inline, 1 eager,
//! 2 single, 3 cooperative, 4 offload, 5 pipeline, 6 remote. Directions are 0 for sends and 1 for receives.

#[cfg(feature = "probes")]
#[allow(unused_imports, missing_docs, clippy::undocumented_unsafe_blocks)]
mod provider {
    #[usdt::provider(provider = "memferry")]
    mod memferry {
        fn plan(bytes: u64, path: u64, reason: &str) {}
        fn submit(bytes: u64, path: u64) {}
        fn wake(sequence: u64) {}
        fn complete(failed: u64) {}
        fn fault(done_bytes: u64) {}
        fn fallback(reason: u64) {}
        fn message__begin(direction: u64, bytes: u64) {}
        fn message__end(direction: u64, path: u64, bytes: u64) {}
    }
    pub(super) use memferry::*;
}

macro_rules! probe {
    ($(#[$attribute:meta])* $function:ident, $probe:ident($($argument:ident),*)) => {
        $(#[$attribute])*
        #[inline(always)]
        pub fn $function($($argument: u64),*) {
            #[cfg(feature = "probes")]
            provider::$probe!(|| ($($argument),*));
            #[cfg(not(feature = "probes"))]
            let _ = ($($argument,)*);
        }
    };
}

/// A copy was planned: bytes, path and reason, which are computed only while a tracer listens.
#[inline(always)]
pub fn plan(arguments: impl FnOnce() -> (u64, u64, String)) {
    #[cfg(feature = "probes")]
    provider::plan!(|| {
        let (bytes, path, reason) = arguments();
        (bytes, path, reason)
    });
    #[cfg(not(feature = "probes"))]
    let _ = arguments;
}

probe! {
    /// A copy is submitted.
    submit, submit(bytes, path)
}
probe! {
    /// A submit wakes the thread of a channel.
    wake, wake(sequence)
}
probe! {
    /// A transfer with a completion of its own has ended. One that is a single small descriptor ends without.
    complete, complete(failed)
}
probe! {
    /// A transfer has failed.
    fault, fault(done_bytes)
}
probe! {
    /// The caller has to execute a transfer: 0 the channel is full or closed, 1 the memory cannot be pinned.
    fallback, fallback(reason)
}
probe! {
    /// A message is posted for sending, or its fetch begins.
    message_begin, message__begin(direction, bytes)
}
probe! {
    /// A message was sent or received.
    message_end, message__end(direction, path, bytes)
}
