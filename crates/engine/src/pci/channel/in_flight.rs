//! A descriptor of a channel until its end is reported.

use crate::contract::{Descriptor, ExecutionError};
use crate::pci::hardware::HwStatus;

/// A descriptor that was accepted.
#[derive(Debug)]
pub(super) struct InFlightDescriptor {
    pub(super) descriptor: Descriptor,
    /// The final status, once it is known.
    pub(super) end: Option<FinalStatus>,
}

/// The final status of an entry.
#[derive(Debug, Clone, Copy)]
pub(super) enum FinalStatus {
    Hardware(HwStatus),
    Cancelled,
}

impl InFlightDescriptor {
    pub(super) fn has_failed(&self) -> bool {
        matches!(
            self.end,
            Some(
                FinalStatus::Hardware(HwStatus::Failed(_) | HwStatus::BadMemory { .. })
                    | FinalStatus::Cancelled
            )
        )
    }

    /// Reports the end; returns the error of a failed descriptor.
    pub(super) fn finish(self) -> Result<(), ExecutionError> {
        let error = match self.end {
            Some(FinalStatus::Hardware(HwStatus::Ok)) => {
                self.descriptor.finish(Ok(None));
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::OkNotified)) => {
                self.descriptor.finish_notified();
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::OkValue(value))) => {
                self.descriptor.finish(Ok(Some(value)));
                return Ok(());
            }
            Some(FinalStatus::Hardware(HwStatus::BadMemory { address, done_bytes })) => {
                ExecutionError::BadMemory { address, done_bytes }
            }
            Some(FinalStatus::Cancelled) => ExecutionError::Cancelled { done_bytes: 0 },
            Some(FinalStatus::Hardware(HwStatus::Failed(reason))) => {
                ExecutionError::Engine { done_bytes: 0, reason }
            }
            None => unreachable!("only completed descriptors are finished"),
        };
        self.descriptor.finish(Err(error.clone()));
        Err(error)
    }
}
