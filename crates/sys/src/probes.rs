//! Probes for tracers of the kernel (USDT), such as bpftrace: `docs/guide/seeing.md` has examples.
//!
//! With the feature `probes`, a probe is a no-operation instruction, and a check of one word where its arguments
//! would cost something. Without it there is nothing.
//!
//! Paths of copies are 0 inline, 1 single, 2 shared, 3 hybrid, 4 parts; those of messages 0 inline, 1 eager,
//! 2 single, 3 cooperative, 4 offload, 5 pipeline, 6 remote. Directions are 0 for sends and 1 for receives.

macro_rules! probe {
    ($(#[$attribute:meta])* $name:ident($($argument:ident),*)) => {
        $(#[$attribute])*
        #[inline(always)]
        pub fn $name($($argument: u64),*) {
            #[cfg(feature = "probes")]
            probe::probe!(memferry, $name, $($argument),*);
            #[cfg(not(feature = "probes"))]
            let _ = ($($argument,)*);
        }
    };
}

/// A copy was planned: bytes, path and reason, which are computed only while a tracer listens.
#[inline(always)]
pub fn plan(arguments: impl FnOnce() -> (u64, u64, String)) {
    #[cfg(feature = "probes")]
    {
        let (path, reason);
        probe::probe_lazy!(
            memferry,
            plan,
            {
                let (bytes, planned_path, why) = arguments();
                (path, reason) = (planned_path, std::ffi::CString::new(why).unwrap_or_default());
                bytes
            },
            path,
            reason.as_ptr()
        );
    }
    #[cfg(not(feature = "probes"))]
    let _ = arguments;
}

probe! {
    /// A copy is submitted.
    submit(bytes, path)
}
probe! {
    /// A submit wakes the thread of a channel.
    wake(sequence)
}
probe! {
    /// A transfer with a completion of its own has ended. One that is a single small descriptor ends without.
    complete(failed)
}
probe! {
    /// A transfer has failed.
    fault(done_bytes)
}
probe! {
    /// The caller has to execute a transfer: 0 the channel is full or closed, 1 the memory cannot be pinned.
    fallback(reason)
}
probe! {
    /// A message is posted for sending, or its fetch begins.
    message_begin(direction, bytes)
}
probe! {
    /// A message was sent or received.
    message_end(direction, path, bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_plan_without_a_tracer_is_not_described() {
        super::plan(|| panic!("no tracer listens"));
    }

    /// A tracer finds a probe by the note of its provider and its name.
    #[cfg(feature = "probes")]
    #[test]
    fn a_program_has_a_note_for_a_probe_that_it_calls() {
        super::message_end(1, 2, 3);
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        // In two parts: the text of the test is in the program too.
        let note = [b"\0memferry\0message", b"_end\0".as_slice()].concat();
        assert!(program.windows(note.len()).any(|window| window == note));
    }
}
