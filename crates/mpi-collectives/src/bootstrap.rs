//! Forms the team of a communicator, by an exchange over MPI.
//!
//! Rank 0 creates the shared memory and broadcasts an invitation to it, together with the identity of its
//! host. The ranks join if all of them are on that host. A last exchange makes the result the same at all
//! ranks: there is a team only if all have joined.

use std::ffi::c_int;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};

use memferry_collective::Invitation;

use crate::handles::Handles;
use crate::library::{Handle, Library};
use crate::progress::MpiProgress;
use crate::report;
use crate::team::{HostTeam, INVITATION_BYTES, TeamError};

/// Identity of a host in an invitation.
const HOST_BYTES: usize = 96;
/// What rank 0 broadcasts: host, and invitation, or zeros if there is none.
const MESSAGE_BYTES: usize = HOST_BYTES + INVITATION_BYTES;

/// Whether this process could not become a member of a team. It does not try again: the ranks of every
/// further communicator would wait for it.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// Forms the team. All ranks call it together, and all get a team or none does.
pub(crate) fn form_team(
    library: &'static Library,
    handles: &'static Handles,
    handle: Handle,
    rank: usize,
    size: usize,
) -> Option<HostTeam> {
    let mut message = vec![0u8; MESSAGE_BYTES];
    let mut own = None;
    if rank == 0 && !HAS_FAILED.load(Ordering::Relaxed) {
        match Invitation::new(size) {
            Ok(invitation) => {
                message[..HOST_BYTES].copy_from_slice(&host());
                message[HOST_BYTES..].copy_from_slice(invitation.bytes());
                own = Some(invitation);
            }
            Err(error) => report_failure(rank, &error),
        }
    }
    // SAFETY: the message has exactly so many bytes at every rank.
    let code = unsafe {
        let start = message.as_mut_ptr().cast();
        (library.functions.bcast)(start, MESSAGE_BYTES as c_int, handles.byte, 0, handle)
    };
    let is_here =
        code == 0 && invitation_in(&message).is_some() && !HAS_FAILED.load(Ordering::Relaxed);
    // Nobody joins if not all can: the others would wait in vain.
    if !all_agree(library, handles, handle, is_here) {
        return None;
    }
    let progress = MpiProgress::new(library, handles);
    let team = match own {
        Some(invitation) => HostTeam::accept(invitation, progress),
        None => HostTeam::join(invitation_in(&message).unwrap_or_default(), rank, progress),
    };
    if let Err(error) = &team {
        report_failure(rank, error);
    }
    let has_joined = all_agree(library, handles, handle, team.is_ok());
    team.ok().filter(|_| has_joined)
}

fn report_failure(rank: usize, error: &TeamError) {
    HAS_FAILED.store(true, Ordering::Relaxed);
    report::line(&format!("rank {rank}: collectives are left to the MPI library: {error}"));
}

/// Whether something is true at all ranks.
fn all_agree(library: &Library, handles: &Handles, handle: Handle, yes: bool) -> bool {
    let (own, mut all): (c_int, c_int) = (yes.into(), 0);
    // SAFETY: both numbers are valid, and every rank calls it with the same arguments.
    let code = unsafe {
        let (from, to) = ((&raw const own).cast(), (&raw mut all).cast());
        (library.functions.allreduce)(from, to, 1, handles.int, handles.min, handle)
    };
    code == 0 && all == 1
}

/// The invitation of a message from this host.
fn invitation_in(message: &[u8]) -> Option<&[u8]> {
    let (from, invitation) = message.split_at_checked(HOST_BYTES)?;
    (from == host()).then_some(invitation)
}

/// Identity of this host: equal for processes of one kernel in the same namespaces.
fn host() -> [u8; HOST_BYTES] {
    // For containers that look like one host and are not, and for tests.
    let named = memferry_sys::settings::value_of("MEMFERRY_HOST_ID");
    let text = match named.and_then(|named| named.into_string().ok()) {
        Some(named) => format!("named {named}"),
        None => {
            let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
            // Sockets of invitations belong to a network namespace, pids to a pid namespace.
            let [net, pid] = ["net", "pid"].map(|kind| {
                std::fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |file| file.ino())
            });
            format!("{} {net} {pid}", boot.unwrap_or_default().trim())
        }
    };
    let mut identity = [0; HOST_BYTES];
    let length = text.len().min(HOST_BYTES);
    identity[..length].copy_from_slice(&text.as_bytes()[..length]);
    identity
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_invitation_of_this_host_is_accepted() {
        let mut message = host().to_vec();
        message.extend(b"memory");
        assert_eq!(invitation_in(&message), Some(&b"memory"[..]));
        message[0] ^= 1;
        assert_eq!(invitation_in(&message), None);
        assert_eq!(invitation_in(&[0; MESSAGE_BYTES]), None);
        assert_eq!(invitation_in(&message[..4]), None);
    }
}
