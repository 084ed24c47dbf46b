//! The limit of open files (`RLIMIT_NOFILE`, `ulimit -n`).
//!
//! Most systems start processes with a low soft limit, for programs that use `select`, and a high hard
//! limit for those that need more.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Objects of this process that hold a few descriptors each.
static HOLDERS: AtomicUsize = AtomicUsize::new(0);

/// The number of descriptors that one holder may come to have.
const DESCRIPTORS_PER_HOLDER: usize = 4;

/// Counts an object that holds a few descriptors, until it is dropped.
#[derive(Debug)]
pub struct DescriptorHolder(());

impl DescriptorHolder {
    /// Counts one more. If all of them may come to have half of the descriptors that this process may
    /// open, its soft limit is raised to the hard limit.
    pub fn new() -> Self {
        let holders = HOLDERS.fetch_add(1, Ordering::Relaxed) + 1;
        // The limit is read at intervals: it is a system call.
        if holders.is_power_of_two() || holders.is_multiple_of(16) {
            make_room(holders * DESCRIPTORS_PER_HOLDER);
        }
        Self(())
    }
}

impl Default for DescriptorHolder {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for DescriptorHolder {
    fn drop(&mut self) {
        HOLDERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Raises the soft limit to the hard limit, if `descriptors` are more than half of it.
fn make_room(descriptors: usize) {
    let limit = getrlimit(Resource::Nofile);
    let is_enough = |soft: u64| descriptors as u64 <= soft / 2;
    if !limit.current.is_none_or(is_enough) && limit.current != limit.maximum {
        // A refusal shows when the limit is reached.
        let raised = Rlimit { current: limit.maximum, ..limit };
        let _ = setrlimit(Resource::Nofile, raised);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_before_it_is_reached_and_not_earlier() {
        let before = getrlimit(Resource::Nofile);
        let Some(maximum) = before.maximum.filter(|maximum| *maximum > 600) else { return };
        let soft = || getrlimit(Resource::Nofile).current;
        setrlimit(Resource::Nofile, Rlimit { current: Some(512), ..before }).unwrap();
        make_room(256);
        assert_eq!(soft(), Some(512));
        make_room(257);
        assert_eq!(soft(), Some(maximum));
        setrlimit(Resource::Nofile, before).unwrap();
    }
}
