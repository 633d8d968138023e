# The policy's bundle lives for months. So it lies in the parameter store, encrypted, and neither in Terraform's state nor
# in the launch template, which more people may read. Machines fetch it with their role.
resource "aws_kms_key" "bundle" {
  #checkov:skip=CKV2_AWS_64: The default policy lets IAM decide, as the role below needs it.
  description             = "Join bundle of the Muster cluster ${var.cluster}"
  enable_key_rotation     = true
  deletion_window_in_days = 7
}

resource "aws_ssm_parameter" "bundle" {
  name             = "/muster/${var.cluster}/bundle"
  description      = "Join bundle of the Muster cluster ${var.cluster}"
  type             = "SecureString"
  key_id           = aws_kms_key.bundle.arn
  value_wo         = chomp(var.bundle)
  value_wo_version = var.bundle_version
}

resource "aws_iam_role" "member" {
  name_prefix = "muster-${var.cluster}-"
  description = "Machines of the Muster cluster ${var.cluster}: may read the join bundle, and nothing else"

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "bundle" {
  name = "read-bundle"
  role = aws_iam_role.member.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      { Effect = "Allow", Action = "ssm:GetParameter", Resource = aws_ssm_parameter.bundle.arn },
      { Effect = "Allow", Action = "kms:Decrypt", Resource = aws_kms_key.bundle.arn },
    ]
  })
}

resource "aws_iam_instance_profile" "member" {
  name_prefix = "muster-${var.cluster}-"
  role        = aws_iam_role.member.name
}
