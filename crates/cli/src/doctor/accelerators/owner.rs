//! Who may open a file: its owner, its group and its mode.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;

/// The names of users and groups, as in `/etc/passwd` and `/etc/group`.
#[derive(Debug, Clone, Default)]
pub(super) struct UserNames {
    pub(super) users: String,
    pub(super) groups: String,
}

/// The owner, the group and the mode of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct FilePermissions {
    owner: String,
    group: String,
    /// In octal digits, such as `660`.
    mode: String,
}

impl fmt::Display for FilePermissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner {}, group {}, mode {}", self.owner, self.group, self.mode)
    }
}

impl UserNames {
    /// The permissions of a file; `None` if it does not exist.
    pub(super) fn permissions(&self, path: &Path) -> Option<FilePermissions> {
        let file = fs::metadata(path).ok()?;
        Some(FilePermissions {
            owner: name(&self.users, file.uid()),
            group: name(&self.groups, file.gid()),
            mode: format!("{:03o}", file.mode() & 0o7777),
        })
    }
}

/// The name with this number in lines `name:password:number:...`; the number itself if there is none.
fn name(lines: &str, number: u32) -> String {
    let named = lines.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(number)).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| number.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn owner_group_and_mode_of_a_file_are_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o640)).unwrap();
        let (uid, gid) = file.path().metadata().map(|file| (file.uid(), file.gid())).unwrap();
        let names = UserNames {
            users: format!("nobody:x:{}:\nalice:x:{uid}:{gid}:,,,:/home/alice:/bin/sh\n", uid + 1),
            groups: format!("dsa:x:{gid}:alice\n"),
        };
        let permissions = names.permissions(file.path()).unwrap().to_string();
        assert_eq!(permissions, "owner alice, group dsa, mode 640");
        assert_eq!(names.permissions(Path::new("/nowhere/wq0.0")), None);
    }

    #[test]
    fn a_number_without_a_name_is_shown_itself() {
        for lines in ["", "root:x:0:0\n", "banana\n", "a:x\nb:x:many\n"] {
            assert_eq!(name(lines, 4711), "4711", "{lines}");
        }
        assert_eq!(name("root:x:0:\ndsa:x:4711:\n", 4711), "dsa");
    }
}
